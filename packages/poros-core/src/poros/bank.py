"""The flat adapter bank: every LoRA tensor of the run inside one 1-D float32 buffer per parameter group.

A block's tensors of one group lie together (its *row*), so a visit copies one range in and one range out, and the
optimizer, the norm and the checkpoint each see one tensor per group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["GROUPS", "AdapterBank", "AdapterSignature", "AdapterTensor", "StaticRegion"]

GROUPS = ("lora_A", "lora_B")

# Every tensor starts at a multiple of so many elements: a kernel cannot pick another path for one block than for the
# next, and the 256-value blocks in which 8-bit moments are quantized never span two tensors.
ALIGNMENT_ELEMENTS = 256


@dataclass(frozen=True, slots=True)
class AdapterTensor:
    """One LoRA tensor of a block: where it sits in the module and in its group's row.

    Attributes:
        path: module path of the LoRA layer inside the block.
        group: ``lora_A`` or ``lora_B``.
        shape: (R, I) for ``lora_A``, (O, R) for ``lora_B``.
        offset: first element in the row of its group.
    """

    path: str
    group: str
    shape: tuple[int, int]
    offset: int

    def view(self, row: torch.Tensor) -> torch.Tensor:
        """Return this tensor as a view of its group's ``row``."""
        count = self.shape[0] * self.shape[1]
        return row[self.offset : self.offset + count].view(self.shape)


@dataclass(frozen=True, slots=True)
class AdapterSignature:
    """The LoRA tensors of one block kind, in module order, A before B. Empty where a block has no adapter."""

    tensors: tuple[AdapterTensor, ...]

    def row_size(self, group: str) -> int:
        """Return the padded elements of the group's row."""
        ends = [_padded(t.offset + t.shape[0] * t.shape[1]) for t in self.tensors if t.group == group]
        return max(ends, default=0)


def _padded(count: int) -> int:
    return -(-count // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS


def make_signature(shapes: Sequence[tuple[str, tuple[int, int], tuple[int, int]]]) -> AdapterSignature:
    """Lay out (path, lora_A shape, lora_B shape) triples."""
    offsets = dict.fromkeys(GROUPS, 0)
    tensors = []
    for path, shape_a, shape_b in shapes:
        for group, shape in zip(GROUPS, (shape_a, shape_b), strict=True):
            tensors.append(AdapterTensor(path, group, shape, offsets[group]))
            offsets[group] = _padded(offsets[group] + shape[0] * shape[1])
    return AdapterSignature(tuple(tensors))


class StaticRegion:
    """The fixed device addresses that templates see: one row of weights and one of gradients per group.

    Args:
        signatures: of every block kind.
        device: where the rows lie.
        weight_dtype: weights are cast once when they are loaded, not at every product. Autocast would give the same
            bits: the cast's own gradient is a widening, which adding to a float32 gradient does as well.
    """

    def __init__(
        self,
        signatures: Sequence[AdapterSignature],
        device: torch.device,
        weight_dtype: torch.dtype = torch.float32,
    ) -> None:
        sizes = {g: max((s.row_size(g) for s in signatures), default=0) for g in GROUPS}
        self.weights = {g: torch.zeros(size, device=device, dtype=weight_dtype) for g, size in sizes.items()}
        self.gradients = {
            g: torch.zeros(size, dtype=torch.float32, device=device) for g, size in sizes.items()
        }
        self._padding = torch.zeros(ALIGNMENT_ELEMENTS, device=device, dtype=weight_dtype)

    def add_gradients(self, signature: AdapterSignature, grads: Sequence[torch.Tensor]) -> None:
        """Add one gradient per tensor of ``signature``, in its order, with one addition per group.

        A kernel per tensor costs more than its sums.
        """
        for group in GROUPS:
            size = signature.row_size(group)
            if not size:
                continue
            parts, end = [], 0
            for tensor, grad in zip(signature.tensors, grads, strict=True):
                if tensor.group == group:
                    parts += [self._padding[: tensor.offset - end], grad.reshape(-1)]
                    end = tensor.offset + grad.numel()
            parts.append(self._padding[: size - end])
            self.gradients[group][:size].add_(torch.cat([part for part in parts if part.numel()]))

    def weight(self, tensor: AdapterTensor) -> torch.Tensor:
        """Return the weight view of ``tensor``."""
        return tensor.view(self.weights[tensor.group])

    def gradient(self, tensor: AdapterTensor) -> torch.Tensor:
        """Return the gradient view of ``tensor``."""
        return tensor.view(self.gradients[tensor.group])


class AdapterBank:
    """Adapter weights and gradients of every block.

    Attributes:
        weights: per group, the flat float32 weights. Padding is zero and stays zero (with 8-bit moments on a CPU nearly
            so: bitsandbytes has no code for zero there). Nothing reads it.
        gradients: per group, the flat float32 gradients of the current optimizer step.
    """

    def __init__(self, signatures: Sequence[AdapterSignature], device: torch.device) -> None:
        self.signatures = tuple(signatures)
        self._rows: list[dict[str, slice]] = []
        starts = dict.fromkeys(GROUPS, 0)
        for signature in self.signatures:
            row = {}
            for group in GROUPS:
                size = signature.row_size(group)
                row[group] = slice(starts[group], starts[group] + size)
                starts[group] += size
            self._rows.append(row)
        self.weights = {
            g: torch.zeros(size, dtype=torch.float32, device=device) for g, size in starts.items()
        }
        self.gradients = {
            g: torch.zeros(size, dtype=torch.float32, device=device) for g, size in starts.items()
        }

    def has_adapter(self, block: int) -> bool:
        """Whether ``block`` has any LoRA tensor."""
        return bool(self.signatures[block].tensors)

    def lowest_adapted(self) -> int:
        """Return the lowest block with an adapter; backward needs no visit below it."""
        return next(block for block in range(len(self.signatures)) if self.has_adapter(block))

    def load_weights(self, block: int, region: StaticRegion) -> None:
        """Copy the block's weights into the static region."""
        self._copy(block, self.weights, region.weights, into_region=True)

    def load_gradients(self, block: int, region: StaticRegion) -> None:
        """Copy the block's gradients so far into the static region, to be added to."""
        self._copy(block, self.gradients, region.gradients, into_region=True)

    def store_gradients(self, block: int, region: StaticRegion) -> None:
        """Copy the block's gradients from the static region back."""
        self._copy(block, self.gradients, region.gradients, into_region=False)

    def _copy(
        self,
        block: int,
        bank: Mapping[str, torch.Tensor],
        region: Mapping[str, torch.Tensor],
        *,
        into_region: bool,
    ) -> None:
        for group, row in self._rows[block].items():
            size = row.stop - row.start
            if size and into_region:
                region[group][:size].copy_(bank[group][row])
            elif size:
                bank[group][row].copy_(region[group][:size])

    def zero_gradients(self) -> None:
        """Start an optimizer step: gradients start from zero and are added to, in every mode."""
        for gradient in self.gradients.values():
            gradient.zero_()

    def release(self) -> None:
        """Give the memory back, where somebody else holds the weights from now on."""
        self.weights = {group: weight.new_empty(0) for group, weight in self.weights.items()}
        self.gradients = {group: gradient.new_empty(0) for group, gradient in self.gradients.items()}

    def tensors(
        self, buffers: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[int, AdapterTensor, torch.Tensor]]:
        """Yield (block, tensor, view) of every LoRA tensor in ``buffers``, which are shaped like the bank's."""
        for block, signature in enumerate(self.signatures):
            for tensor in signature.tensors:
                yield block, tensor, tensor.view(buffers[tensor.group][self._rows[block][tensor.group]])
