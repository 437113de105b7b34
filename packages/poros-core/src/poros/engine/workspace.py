"""Where stored weights become matrices: one buffer for all blocks, because only one is visited at a time.

Matrices that come and go through the allocator would leave holes between activations that no later matrix fits.

Shape letters: O out features, I in features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from poros.adapters import base_linears
from poros.blocks.frozen_linear import FrozenLinear
from poros.blocks.kinds import BlockKind

__all__ = ["Workspace", "workspace_elements"]

# Every matrix starts at a 256-byte boundary in any 16- or 32-bit dtype, as a fresh allocation would.
ALIGNMENT_ELEMENTS = 128


def workspace_elements(sizes: Iterable[Sequence[int]], *, per_visit: bool) -> int:
    """Return the elements of the buffer.

    Args:
        sizes: per block kind, the elements of the matrices that must be dequantized.
        per_visit: whether all matrices of a block lie side by side, or every product reuses the same place.
    """
    if per_visit:
        return max((sum(_aligned(size) for size in kind) for kind in sizes), default=0)
    return max((size for kind in sizes for size in kind), default=0)


class Workspace:
    """The buffer and how linear layers share it.

    Args:
        kinds: of the blocks.
        compute_dtype: of the matrices.
        device: where they lie.
        per_visit: all matrices of a block stay for the whole visit; otherwise each lasts until the next is needed.
    """

    def __init__(
        self, kinds: Sequence[BlockKind], compute_dtype: torch.dtype, device: torch.device, *, per_visit: bool
    ) -> None:
        sizes = [
            [_size(linear) for _, linear in _dequantized(base_linears(kind.prototype))] for kind in kinds
        ]
        self._per_visit = per_visit
        count = workspace_elements(sizes, per_visit=per_visit)
        self._buffer = torch.empty(count, dtype=compute_dtype, device=device)

    def bind(self, linears: Iterable[tuple[str, FrozenLinear]]) -> None:
        """Point a block's layers at their (O, I) matrices, or at the one place that they take turns in."""
        start = 0
        for _, linear in _dequantized(linears):
            end = start + _size(linear)
            place = self._buffer[start:end].view(linear.out_features, linear.in_features)
            if self._per_visit:
                linear.workspace = place
                start = _aligned(end)
            else:
                linear.scratch = place


def _dequantized(linears: Iterable[tuple[str, FrozenLinear]]) -> Iterable[tuple[str, FrozenLinear]]:
    return ((path, linear) for path, linear in linears if linear.needs_dequantize)


def _size(linear: FrozenLinear) -> int:
    return linear.out_features * linear.in_features


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS
