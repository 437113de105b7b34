"""What predictions need to know about a model, read once off the meta model.

Shape letters: O and I of a linear layer, R LoRA rank, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from poros.adapters import base_linears
from poros.bank import GROUPS
from poros.blocks.frozen_linear import FrozenLinear
from poros.blocks.kinds import BlockKind
from poros.engine.unread import unread_products
from poros.model import MetaModel
from poros.optimizer import moment_bytes_per_element
from poros.planning.linear_attention import LinearAttention, linear_attention
from poros.planning.working_set import kept_bytes, working_set_bytes
from poros.settings import Numerics

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["KindFacts", "ModelFacts", "model_facts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KindFacts:
    """One block kind in numbers.

    Attributes:
        block_bytes: stored bytes of one block.
        weights: elements of all its matrices.
        dequantized: elements of each matrix that a product must dequantize first.
        unread_weights: elements of the matrices whose products a recompute leaves out.
        unread_dequantized: of these, the elements that a product must dequantize first.
        widths: input and output features of all its linear layers, summed.
        num_linears: its linear layers.
        adapter_weights: LoRA elements, without padding.
        adapter_row: LoRA elements of one row of the bank, padding included.
        window: tokens that a position sees in a sliding layer; None sees all before it.
        head_dim: its largest attention head.
        linear_attention: its delta rule, None where it has ordinary attention.
    """

    blocks: tuple[int, ...]
    block_bytes: int
    weights: int
    dequantized: tuple[int, ...]
    unread_weights: int
    unread_dequantized: int
    widths: int
    num_linears: int
    adapter_weights: int
    adapter_row: int
    window: int | None
    head_dim: int
    linear_attention: LinearAttention | None

    @property
    def dequantized_weights(self) -> int:
        """Elements of all matrices that must be dequantized."""
        return sum(self.dequantized)

    def masked(self, tokens: int) -> bool:
        """Whether attention over so many tokens gets a mask, which flash attention does not take.

        Transformers leaves the mask out where a row is shorter than the window (masking_utils, `is_causal` skip).
        """
        return self.window is not None and tokens >= self.window


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """A model in numbers.

    Widths are elements per position.

    Attributes:
        lowest_adapted: backward visits end at this block.
        largest_linear: elements of the largest matrix of any block.
        states_width: of everything that blocks write for later ones.
        gradients_width: of that, what gets a gradient.
        per_block_width: inputs of all blocks from a second token table.
        per_block_input_width: of one of them.
        per_block_table_bytes: that table.
        per_block_module_weights: elements of the modules that mix its rows in.
        moment_bytes: both of the optimizer's moments of all adapters.
        working_set_bytes: (batch, tokens, device type, packed) -> peak of what a visit allocates.
        kept_bytes: (batch, tokens, device type) -> per kind, what a forward leaves for its backward without recompute.
    """

    kinds: tuple[KindFacts, ...]
    num_blocks: int
    hidden: int
    vocabulary: int
    num_heads: int
    tied: bool
    lowest_adapted: int
    largest_linear: int
    table_bytes: int
    compute_bytes: int
    storage_bytes: int
    states_width: int
    gradients_width: int
    per_block_width: int
    per_block_input_width: int
    per_block_table_bytes: int
    per_block_module_weights: int
    moment_bytes: int
    working_set_bytes: Callable[[int, int, str, bool], int]
    kept_bytes: Callable[[int, int, str], tuple[int, ...]]

    @property
    def store_bytes(self) -> int:
        """Stored bytes of all blocks."""
        return sum(kind.block_bytes * len(kind.blocks) for kind in self.kinds)

    @property
    def largest_block_bytes(self) -> int:
        """Stored bytes of the largest block."""
        return max(kind.block_bytes for kind in self.kinds)

    @property
    def adapter_elements(self) -> int:
        """Elements of the bank."""
        return sum(kind.adapter_row * len(kind.blocks) for kind in self.kinds)

    @property
    def needs_dequantize(self) -> bool:
        """Whether any stored weight must become a matrix before a product."""
        return any(kind.dequantized_weights for kind in self.kinds)


def model_facts(meta: MetaModel, numerics: Numerics, optimizer: str = "adamw") -> ModelFacts:
    """Return the numbers of a meta model; ``optimizer`` is `OptimizerSettings.name`."""
    config = meta.config
    kernels = meta.architecture.kernels()
    kinds = tuple(_kind_facts(kind, config, kernels, unread_products(meta, kind)) for kind in meta.kinds)
    hidden, num_heads = int(config.hidden_size), int(config.num_attention_heads)
    lowest = min((b for kind in kinds if kind.adapter_row for b in kind.blocks), default=0)
    written = {spec.name: spec.width for kind in meta.kinds for spec in kind.states.writes}
    return ModelFacts(
        kinds=kinds,
        num_blocks=len(meta.blocks),
        hidden=hidden,
        vocabulary=int(config.vocab_size),
        num_heads=num_heads,
        tied=meta.parts.tied,
        lowest_adapted=lowest,
        largest_linear=max(
            _elements(linear) for kind in meta.kinds for _, linear in base_linears(kind.prototype)
        ),
        table_bytes=int(config.vocab_size) * hidden * numerics.storage_dtype.itemsize,
        compute_bytes=numerics.compute_dtype.itemsize,
        storage_bytes=numerics.storage_dtype.itemsize,
        states_width=sum(written.values()),
        gradients_width=sum(w for name, w in written.items() if meta.state_writers[name] >= lowest),
        **_per_block_facts(meta, numerics),
        moment_bytes=int(
            sum(kind.adapter_row * len(kind.blocks) for kind in kinds) * moment_bytes_per_element(optimizer)
        ),
        working_set_bytes=lambda batch, tokens, device_type, packed: working_set_bytes(
            meta, numerics, batch=batch, tokens=tokens, device_type=device_type, packed=packed
        ),
        kept_bytes=lambda batch, tokens, device_type: kept_bytes(
            meta, numerics, batch=batch, tokens=tokens, device_type=device_type
        ),
    )


def _per_block_facts(meta: MetaModel, numerics: Numerics) -> dict[str, int]:
    declared = meta.per_block_inputs
    if declared is None:
        names = ("width", "input_width", "table_bytes", "module_weights")
        return {f"per_block_{name}": 0 for name in names}
    table = meta.module.get_parameter(f"{declared.table}.weight")
    modules = [meta.module.get_submodule(path) for path in declared.modules]
    return {
        "per_block_width": int(table.shape[1]),
        "per_block_input_width": declared.spec.width,
        "per_block_table_bytes": table.numel() * numerics.storage_dtype.itemsize,
        "per_block_module_weights": sum(p.numel() for module in modules for p in module.parameters()),
    }


def _kind_facts(
    kind: BlockKind, config: PreTrainedConfig, kernels: Mapping[str, str], unread: Set[str]
) -> KindFacts:
    window = getattr(config, "sliding_window", None) if kind.layer_type == "sliding_attention" else None
    named = dict(base_linears(kind.prototype))
    linears = named.values()
    dequantized = [_elements(linear) for linear in linears if linear.needs_dequantize]
    left_out = [named[path] for path in unread]
    return KindFacts(
        window=None if window is None else int(window),
        head_dim=kind.head_dim or int(config.hidden_size) // int(config.num_attention_heads),
        linear_attention=linear_attention(config, kind.layer_type, kernels),
        blocks=kind.blocks,
        block_bytes=kind.layout.num_bytes,
        weights=sum(map(_elements, linears)),
        dequantized=tuple(dequantized),
        unread_weights=sum(map(_elements, left_out)),
        unread_dequantized=sum(_elements(linear) for linear in left_out if linear.needs_dequantize),
        widths=sum(linear.in_features + linear.out_features for linear in linears),
        num_linears=len(linears),
        adapter_weights=sum(tensor.shape[0] * tensor.shape[1] for tensor in kind.adapter.tensors),
        adapter_row=sum(kind.adapter.row_size(group) for group in GROUPS),
    )


def _elements(linear: FrozenLinear) -> int:
    return linear.in_features * linear.out_features
