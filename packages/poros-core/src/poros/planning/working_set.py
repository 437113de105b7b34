"""What a visit holds at its peak, found by running the very block on tensors that have shapes and no bytes.

A formula over layer widths misses what lies between the products, which differs from family to family; the kernels of
one forward and one recompute + backward, issued on fake tensors, say when each intermediate is born and freed.

Shape letters: B batch, T tokens, D hidden size, H heads, E head size.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from poros.blocks.kinds import BlockKind
from poros.engine.fake_visit import fake_visit
from poros.model import MetaModel
from poros.precision import attention_backend
from poros.settings import Numerics

__all__ = ["flash_accumulator_bytes", "kept_bytes", "working_set_bytes"]

# Deterministic flash attention sums the gradient of the queries in as many float32 copies as it takes to occupy every
# multiprocessor (torch: flash_attn/flash_api.cpp, mha_bwd). An H100's and H200's where no device is at hand.
ASSUMED_MULTIPROCESSORS = 132
FLOAT32_BYTES = 4
MAX_SIMULATIONS = 512


def working_set_bytes(
    meta: MetaModel, numerics: Numerics, *, batch: int, tokens: int, device_type: str, packed: bool = False
) -> int:
    """Return the peak of what a visit of a (B, T) micro-batch allocates: eager blocks, the largest kind.

    Stored weights, dequantized matrices, adapters and the visit's own inputs and outputs are not in it. What the
    block's layers allocate is found on fake tensors: no memory and no device is needed.
    """
    return max(
        _simulate(meta, kind, numerics, batch, tokens, device_type, packed)[0]
        for kind in _different(meta).values()
    )


def kept_bytes(
    meta: MetaModel, numerics: Numerics, *, batch: int, tokens: int, device_type: str
) -> tuple[int, ...]:
    """Return, per kind, what the forward of a (B, T) micro-batch keeps for its backward: eager blocks."""
    different = _different(meta)
    return tuple(
        _simulate(meta, different[_form(kind)], numerics, batch, tokens, device_type, False)[1]
        for kind in meta.kinds
    )


def flash_accumulator_bytes(batch: int, tokens: int, *, heads: int, head_dim: int) -> int:
    """Return what the deterministic backward of flash attention sums the gradient of the queries in."""
    copies = -(-_multiprocessors() // (batch * heads))
    return copies * batch * _up(tokens, 128) * heads * _up(head_dim, 32) * FLOAT32_BYTES


def _different(meta: MetaModel) -> dict[Hashable, BlockKind]:
    """Kinds that differ in constants alone hold the same."""
    return {_form(kind): kind for kind in meta.kinds}


def _form(kind: BlockKind) -> Hashable:
    frozen = tuple((entry.spec.name, entry.spec.shape) for entry in kind.layout.entries)
    return kind.layer_type, frozen, kind.adapter, kind.states


@lru_cache(maxsize=MAX_SIMULATIONS)
def _simulate(
    meta: MetaModel,
    kind: BlockKind,
    numerics: Numerics,
    batch: int,
    tokens: int,
    device_type: str,
    packed: bool,
) -> tuple[int, int]:
    """Return the peak, and what is alive between a recorded forward and its backward."""
    target = torch.device(device_type)
    dtype = numerics.compute_dtype
    with fake_visit(meta, kind, dtype, batch=batch, tokens=tokens, packed=packed) as visit:
        template, hidden, context, states = visit.template, visit.hidden, visit.context, visit.states
        gradient = torch.empty_like(hidden)
        masked = context.attention_masks[kind.layer_type] is not None
        backend = attention_backend(target, dtype, masked=masked, head_dim=kind.head_dim)
        flash = backend == SDPBackend.FLASH_ATTENTION
        wanted = [spec.name for spec in kind.states.reads]
        with _FlashMemory(enabled=flash), _LiveBytes() as live:
            template.forward(hidden, context, states)
            recorded = template.record(hidden, context, states, wanted)
            alive = live.count()
            template.backpropagate(recorded, gradient, states)
    # A forward that is kept has copies of its own of what it reads.
    written = {spec.name for spec in kind.states.writes}
    copies = [hidden, *(value for name, value in states.items() if name not in written)]
    return live.peak, alive + sum(value.numel() * value.element_size() for value in copies)


class _LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make, while they live.

    Attributes:
        peak: most bytes alive after any operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._given: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self._made:
                self._given[storage._cdata] = StorageWeakRef(storage)
        output = func(*args, **(kwargs or {}))
        for storage in _storages(output):
            given = self._given.get(storage._cdata)
            if given is None or given.expired():  # an address may be used again
                self._made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, self.count())
        return output

    def count(self) -> int:
        """Return the bytes that are alive now."""
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        return sum(count for _, count in self._made.values())


def _storages(values: object) -> list[torch.UntypedStorage]:
    return [value.untyped_storage() for value in tree_iter(values) if isinstance(value, torch.Tensor)]


class _FlashMemory(TorchFunctionMode):
    """Puts the memory of flash attention in the place of scaled dot products; a fake CPU tensor would get the math."""

    def __init__(self, *, enabled: bool) -> None:
        super().__init__()
        self._enabled = enabled

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._enabled and func is F.scaled_dot_product_attention:
            return _FlashAttention.apply(*args[:3])
        return func(*args, **(kwargs or {}))


class _FlashAttention(torch.autograd.Function):
    """Allocates what flash attention allocates; computes nothing. Tensors are (B, H, T, E)."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        output = torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype)
        log_sum_exp = torch.empty(query.shape[:-1])
        ctx.save_for_backward(query, key, value, output, log_sum_exp)
        return output

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value, _, _ = ctx.saved_tensors  # type: ignore[attr-defined]
        batch, heads, tokens, size = query.shape
        count = flash_accumulator_bytes(batch, tokens, heads=heads, head_dim=size)
        accumulated = torch.empty(count, dtype=torch.uint8)
        # Shared keys and values get a gradient per query head first, which is summed afterwards.
        per_head = [value.new_empty(query.shape) for _ in range(2)] if key.shape[1] != heads else []
        result = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del accumulated, per_head
        return result


def _multiprocessors() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).multi_processor_count)
    return ASSUMED_MULTIPROCESSORS


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
