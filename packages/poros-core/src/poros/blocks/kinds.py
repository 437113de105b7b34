"""Block kinds: blocks whose layout, forward constants and adapter shapes agree share templates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from poros.adapters import ADAPTER, base_linears, lora_layers
from poros.bank import AdapterSignature, make_signature
from poros.blocks.layout import BlockLayout, make_layout
from poros.interfaces import BlockStates, TensorSpec, WeightFormat

__all__ = ["BlockKind", "block_constants", "block_layout", "classify_blocks"]

# A block's own index differs in every block and is not read by any layer that is called without a cache.
INDEX_ATTRIBUTE = "layer_idx"

SCALARS = (bool, int, float, str, torch.dtype)


@dataclass(frozen=True, slots=True)
class BlockKind:
    """What a template is made from.

    Attributes:
        prototype: the meta block, PEFT-injected, with frozen linears.
        layout: the table of its frozen tensors.
        adapter: its LoRA tensors.
        layer_type: key of the block context's masks and rotary tables.
        states: what the blocks read and write besides hidden states.
        blocks: indices of the blocks of this kind.
    """

    prototype: nn.Module
    layout: BlockLayout
    adapter: AdapterSignature
    layer_type: str
    states: BlockStates
    blocks: tuple[int, ...]

    @property
    def head_dim(self) -> int:
        """The largest attention head of the block: not every attention kernel takes every size."""
        return max(
            (size for m in self.prototype.modules() if isinstance(size := getattr(m, "head_dim", None), int)),
            default=0,
        )


def block_layout(block: nn.Module, weight_format: WeightFormat, storage_dtype: torch.dtype) -> BlockLayout:
    """Return the table of a meta block's frozen tensors, named as in the checkpoint (plus the format's suffixes)."""
    specs: list[TensorSpec] = []
    inside_linears = set()
    for path, linear in base_linears(block):
        inside_linears.add(path)
        for spec in weight_format.specs(linear.out_features, linear.in_features):
            specs.append(TensorSpec(name=f"{path}.{spec.name}", dtype=spec.dtype, shape=spec.shape))
        if linear.has_bias:
            specs.append(TensorSpec(name=f"{path}.bias", dtype=storage_dtype, shape=(linear.out_features,)))
    specs.extend(
        TensorSpec(name=name, dtype=storage_dtype, shape=tuple(tensor.shape))
        for name, tensor in plain_tensors(block)
    )
    return make_layout(specs)


def plain_tensors(block: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return (name, meta tensor) of every frozen parameter and persistent buffer that belongs to no linear layer."""
    skip = tuple(
        f"{path}{suffix}."
        for path, _ in base_linears(block)
        for suffix in ("", ".base_layer", ".lora_A", ".lora_B", ".lora_dropout")
    )
    return [(name, tensor) for name, tensor in block.state_dict().items() if not name.startswith(skip)]


def _adapter_signature(block: nn.Module) -> AdapterSignature:
    shapes = []
    for path, layer in lora_layers(block):
        lora_a, lora_b = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
        shapes.append((path, tuple(lora_a.weight.shape), tuple(lora_b.weight.shape)))
    return make_signature(shapes)


def block_constants(block: nn.Module) -> tuple[object, ...]:
    """Return every constant that a forward may read: two blocks that differ in one must not share a graph."""
    found: list[object] = []
    for path, module in block.named_modules():
        found.append((path, type(module).__module__, type(module).__qualname__))
        for name, value in sorted(vars(module).items()):
            if name in (INDEX_ATTRIBUTE, "training", "workspace", "scratch", "reads_product"):
                continue
            if isinstance(value, SCALARS) or value is None:
                found.append((path, name, value))
            elif isinstance(value, list | tuple) and all(isinstance(v, SCALARS) for v in value):
                found.append((path, name, tuple(value)))
            elif isinstance(value, dict) and all(isinstance(v, SCALARS) for v in value.values()):
                found.append((path, name, tuple(sorted(value.items()))))
    return tuple(found)


def classify_blocks(
    blocks: nn.ModuleList,
    layer_types: Sequence[str],
    weight_format: WeightFormat,
    storage_dtype: torch.dtype,
    *,
    states: Sequence[BlockStates],
) -> tuple[BlockKind, ...]:
    """Group the meta blocks of an injected model by kind, in order of first appearance."""
    groups: dict[object, list[int]] = {}
    made: dict[object, tuple[BlockLayout, AdapterSignature]] = {}
    for index, block in enumerate(blocks):
        layout = block_layout(block, weight_format, storage_dtype)
        adapter = _adapter_signature(block)
        key = (layout, adapter, layer_types[index], states[index], block_constants(block))
        groups.setdefault(key, []).append(index)
        made[key] = (layout, adapter)
    return tuple(
        BlockKind(
            prototype=blocks[indices[0]],
            layout=made[key][0],
            adapter=made[key][1],
            layer_type=layer_types[indices[0]],
            states=states[indices[0]],
            blocks=tuple(indices),
        )
        for key, indices in groups.items()
    )
