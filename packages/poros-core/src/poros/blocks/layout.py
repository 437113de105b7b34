"""Where every frozen tensor of a block lies inside one contiguous buffer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from poros.interfaces import TensorSpec

__all__ = ["ALIGNMENT_BYTES", "BlockLayout", "LayoutEntry", "align", "make_layout"]

# Vectorized kernels and the copy engine want aligned starts; 256 is what the CUDA allocator itself guarantees.
ALIGNMENT_BYTES = 256


def align(num_bytes: int, boundary: int = ALIGNMENT_BYTES) -> int:
    """Round ``num_bytes`` up to a multiple of ``boundary``."""
    return -(-num_bytes // boundary) * boundary


@dataclass(frozen=True, slots=True)
class LayoutEntry:
    """One tensor of a block and its byte offset in the block's buffer."""

    spec: TensorSpec
    offset: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The table of one block kind: entries in order, total bytes a multiple of the alignment."""

    entries: tuple[LayoutEntry, ...]
    num_bytes: int

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return every tensor as a view of ``buffer``, a uint8 vector of at least ``num_bytes``. No copy."""
        tensors = {}
        for entry in self.entries:
            spec = entry.spec
            flat = buffer[entry.offset : entry.offset + spec.num_bytes].view(spec.dtype)
            tensors[spec.name] = flat.view(spec.shape)
        return tensors

    def fingerprint(self) -> str:
        """Return a hash of names, dtypes, shapes and offsets."""
        digest = hashlib.sha256()
        for entry in self.entries:
            digest.update(repr((entry.spec, entry.offset)).encode())
        return digest.hexdigest()


def make_layout(specs: Iterable[TensorSpec]) -> BlockLayout:
    """Place ``specs`` one after another, each at an aligned offset."""
    entries = []
    offset = 0
    for spec in specs:
        entries.append(LayoutEntry(spec, offset))
        offset = align(offset + spec.num_bytes)
    return BlockLayout(tuple(entries), offset)
