"""The settings of a run, validated when they are made.

Two kinds, never mixed: *numerics* decide bits and are recorded and fingerprinted; *placement* decides where bytes
live and when they move, and never changes a bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from poros.errors import ConfigError, explain

if TYPE_CHECKING:
    import torch  # seconds, which a command that only shows settings must not take

__all__ = [
    "ACCUMULATION_ORDERS",
    "BLOCK_EXECUTIONS",
    "DTYPE_NAMES",
    "PLACES",
    "LoraSettings",
    "Numerics",
    "OptimizerSettings",
    "Plan",
    "named_dtypes",
]

DTYPE_NAMES = ("bfloat16", "float32")
ACCUMULATION_ORDERS = ("block-major", "micro-batch-major")
OPTIMIZERS = ("adamw", "adamw_8bit")
# Transformers' names.
SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine", "warmup_stable_decay")
RESIDENCIES = ("streamed", "resident")
BLOCK_EXECUTIONS = ("eager", "compiled")
PLACES = ("device", "host")
# Twice as much, the width of the range that noise is drawn from, is still a number in either dtype.
MAX_NEFTUNE_ALPHA = 1e38


def named_dtypes() -> dict[str, torch.dtype]:
    """Return by name the dtypes that a run computes in or keeps weights in."""
    import torch

    return {name: getattr(torch, name) for name in DTYPE_NAMES}


def _bfloat16() -> torch.dtype:
    return named_dtypes()["bfloat16"]


def _require_integer(name: str, value: object, *, least: int) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    expected = {0: "zero or a positive integer", 1: "a positive integer"}.get(least, f"{least} or more")
    _require(whole and value >= least, name, expected, value)  # type: ignore[operator]


def _require(condition: bool, name: str, expected: object, got: object) -> None:
    if not condition:
        raise ConfigError(explain(f"Bad setting `{name}`", expected=expected, got=repr(got)))


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """What PEFT's `LoraConfig` is made from.

    Attributes:
        rank: R of every adapter that ``rank_pattern`` does not name.
        alpha: scaling numerator (``alpha / rank``, or ``alpha / sqrt(rank)`` with ``use_rslora``).
        dropout: probability on the adapter's input.
        targets: leaf names of linear layers, ``("all-linear",)`` for all those of the blocks, or None for the
            architecture's defaults.
        blocks: block indices that get adapters, or None for all.
        rank_pattern, alpha_pattern: PEFT's per-module overrides (regular expression -> value).
        init_from: folder of a run or of a PEFT adapter whose weights training starts from. Its rank, alpha, scaling
            rule and adapted layers must be those of the settings above.
    """

    rank: int = 16
    alpha: float = 32
    dropout: float = 0.0
    targets: tuple[str, ...] | None = None
    blocks: tuple[int, ...] | None = None
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    init_from: str | None = None

    def __post_init__(self) -> None:
        _require_integer("lora.rank", self.rank, least=1)
        _require(0 < self.alpha < math.inf, "lora.alpha", "a positive number", self.alpha)
        _require(0 <= self.dropout < 1, "lora.dropout", "a probability in [0, 1)", self.dropout)
        if self.targets is not None:
            _require(len(self.targets) > 0, "lora.targets", "at least one leaf name", self.targets)
        if self.blocks is not None:  # PEFT would take an empty list for all blocks
            _require(len(self.blocks) > 0, "lora.blocks", "at least one block, or null for all", self.blocks)
        for pattern, rank in self.rank_pattern.items():
            _require_integer(f"lora.rank_pattern[{pattern!r}]", rank, least=1)
        for pattern, alpha in self.alpha_pattern.items():
            name = f"lora.alpha_pattern[{pattern!r}]"
            _require(0 < alpha < math.inf, name, "a positive number", alpha)


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """Settings that decide bits, the same under every plan.

    Attributes:
        compute_dtype: dtype of matrix products and hidden states.
        storage_dtype: dtype of norms, biases, embedding and head.
        length_bucket: T is rounded up to a multiple of this.
        loss_chunk_positions, loss_chunk_vocabulary: supervised positions and vocabulary entries per head product.
        blocks: ``eager`` (Transformers' layers as they are) or ``compiled`` (one `torch.compile` per block kind and
            shape; fused kernels round differently).
        neftune_alpha: NEFTune: in training, uniform noise below ``alpha / sqrt(T * D)`` is added to the rows of the
            embedding. 0 is off.
    """

    compute_dtype: torch.dtype = field(default_factory=_bfloat16)
    storage_dtype: torch.dtype = field(default_factory=_bfloat16)
    length_bucket: int = 64
    loss_chunk_positions: int = 512
    loss_chunk_vocabulary: int = 16384
    blocks: str = "eager"
    neftune_alpha: float = 0.0

    def __post_init__(self) -> None:
        for name in ("compute_dtype", "storage_dtype"):
            value = getattr(self, name)
            _require(value in named_dtypes().values(), name, " or ".join(DTYPE_NAMES), value)
        _require_integer("length_bucket", self.length_bucket, least=1)
        _require_integer("loss_chunk_positions", self.loss_chunk_positions, least=1)
        _require_integer("loss_chunk_vocabulary", self.loss_chunk_vocabulary, least=1)
        _require(self.blocks in BLOCK_EXECUTIONS, "blocks", " | ".join(BLOCK_EXECUTIONS), self.blocks)
        alpha = self.neftune_alpha
        _require(alpha >= 0, "neftune_alpha", "zero or more", alpha)
        _require(alpha <= MAX_NEFTUNE_ALPHA, "neftune_alpha", f"at most {MAX_NEFTUNE_ALPHA:g}", alpha)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """AdamW over the flat bank, its schedule and its clipping.

    Attributes:
        name: ``adamw``, or ``adamw_8bit``: bitsandbytes' AdamW with both moments in 8 bits.
        learning_rate: the peak, of ``lora_A``.
        lora_plus_ratio: LoRA+: the rate of ``lora_B`` is this times that of ``lora_A``.
        max_grad_norm: gradients are scaled down to this norm; None clips nothing.
        schedule: Transformers' name of it.
        warmup_steps: optimizer steps over which the rate rises from zero.
        decay_steps: of ``warmup_stable_decay``, the last steps of the run, over which the rate falls to zero.
    """

    name: str = "adamw"
    learning_rate: float = 2e-4
    lora_plus_ratio: float = 1.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float | None = 1.0
    schedule: str = "linear"
    warmup_steps: int = 0
    decay_steps: int = 0

    def __post_init__(self) -> None:
        rate, decay, ratio = self.learning_rate, self.weight_decay, self.lora_plus_ratio
        _require(self.name in OPTIMIZERS, "name", " | ".join(OPTIMIZERS), self.name)
        _require(0 < rate < math.inf, "learning_rate", "a positive number", rate)
        _require(0 < ratio < math.inf, "lora_plus_ratio", "a positive number", ratio)
        _require(0 <= decay < math.inf, "weight_decay", "zero or more", decay)
        _require(0 <= self.beta1 < 1, "beta1", "a number in [0, 1)", self.beta1)
        _require(0 <= self.beta2 < 1, "beta2", "a number in [0, 1)", self.beta2)
        _require(self.eps > 0, "eps", "a positive number", self.eps)
        _require(self.schedule in SCHEDULES, "schedule", " | ".join(SCHEDULES), self.schedule)
        _require_integer("warmup_steps", self.warmup_steps, least=0)
        if self.schedule == "constant":
            expected = "0 with `schedule: constant` (`constant_with_warmup` has a warm-up)"
            _require(self.warmup_steps == 0, "warmup_steps", expected, self.warmup_steps)
        _require_integer("decay_steps", self.decay_steps, least=0)
        if self.schedule == "warmup_stable_decay":
            expected = "a positive integer with `schedule: warmup_stable_decay`"
            _require(self.decay_steps > 0, "decay_steps", expected, self.decay_steps)
        else:
            expected = (
                f"0 with `schedule: {self.schedule}` (`warmup_stable_decay` has a decay of its own length)"
            )
            _require(self.decay_steps == 0, "decay_steps", expected, self.decay_steps)
        if self.max_grad_norm is not None:
            _require(self.max_grad_norm > 0, "max_grad_norm", "a positive number or null", self.max_grad_norm)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Placement of a run: where blocks live and when they move. Never changes a bit.

    Attributes:
        residency: ``streamed`` (host store, device slots) or ``resident`` (every block in device memory, no copy
            stream, no host reads).
        num_slots: device slots for streamed blocks, at least 2.
        resident_blocks: of a streamed run, how many blocks stay in device memory, spread evenly over the depth.
        kept_blocks: how many of the blocks in device memory, the highest ones, keep what their backward needs from
            their forward instead of recomputing it. Packed rows are recomputed all the same.
        disk_blocks: of a streamed run, how many of the blocks that are not resident come from the cached store on the
            disk instead of host memory, spread evenly among them. Needs a folder for quantized stores.
        head: ``device``, or ``host``: the head's vocabulary chunks are streamed through the slots like blocks.
        activations: block inputs are kept in ``device`` memory or in pinned ``host`` memory until backward.
        order: ``block-major`` (every micro-batch of the step visits block k before block k+1) or
            ``micro-batch-major`` (each micro-batch runs forward and backward alone).
        workspace: dequantize a block once per visit into a device buffer; otherwise at every use.
        graphs: capture the kernels of a visit once per (block kind, buffer, shape) and replay them; CUDA only.
        pin_host_memory: register the host store for asynchronous copies; otherwise a pinned staging ring is used.
    """

    residency: str = "streamed"
    num_slots: int = 3
    resident_blocks: int = 0
    kept_blocks: int = 0
    disk_blocks: int = 0
    head: str = "device"
    activations: str = "device"
    order: str = "block-major"
    workspace: bool = False
    graphs: bool = True
    pin_host_memory: bool = True

    def __post_init__(self) -> None:
        _require(self.residency in RESIDENCIES, "residency", " | ".join(RESIDENCIES), self.residency)
        _require_integer("slots", self.num_slots, least=2)
        _require_integer("resident_blocks", self.resident_blocks, least=0)
        _require_integer("kept_blocks", self.kept_blocks, least=0)
        _require_integer("disk_blocks", self.disk_blocks, least=0)
        if self.residency == "streamed":
            expected = (
                f"at most the {self.resident_blocks} of `resident_blocks`: a slot is refilled before backward"
            )
            _require(self.kept_blocks <= self.resident_blocks, "kept_blocks", expected, self.kept_blocks)
        else:
            expected = "0 with `residency: resident`: nothing is streamed"
            _require(self.disk_blocks == 0, "disk_blocks", expected, self.disk_blocks)
        for name in ("head", "activations"):
            _require(getattr(self, name) in PLACES, name, " | ".join(PLACES), getattr(self, name))
        _require(self.order in ACCUMULATION_ORDERS, "order", " | ".join(ACCUMULATION_ORDERS), self.order)
