"""Boundary activations: the input of every block of every micro-batch, in one buffer that is reused from step to step.

Shape letters: B batch, T tokens, D hidden size, L blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["BoundaryActivations"]


class BoundaryActivations:
    """(L + 1, B, T, D) per micro-batch, carved out of a flat buffer that grows to the largest pass.

    Args:
        num_blocks: L.
        hidden_size: D.
        device: where they are kept.
        dtype: dtype of hidden states.
    """

    def __init__(self, num_blocks: int, hidden_size: int, device: torch.device, dtype: torch.dtype) -> None:
        self._num_blocks = num_blocks
        self._hidden_size = hidden_size
        self._buffer = torch.empty(0, device=device, dtype=dtype)
        self._views: list[torch.Tensor] = []

    def begin(self, shapes: Sequence[tuple[int, int]], *, together: bool) -> None:
        """Carve views for micro-batches of these (B, T) shapes.

        Args:
            shapes: per micro-batch.
            together: every micro-batch is alive at once; otherwise they share the memory of the largest.
        """
        counts = [(self._num_blocks + 1) * b * t * self._hidden_size for b, t in shapes]
        needed = sum(counts) if together else max(counts, default=0)
        if needed > self._buffer.numel():
            self._views = []
            dtype, device = self._buffer.dtype, self._buffer.device
            self._buffer = torch.empty(
                0, device=device, dtype=dtype
            )  # let the old one go before the new one comes
            self._buffer = torch.empty(needed, device=device, dtype=dtype)
        self._views = []
        start = 0
        for (batch, tokens), count in zip(shapes, counts, strict=True):
            flat = self._buffer[start : start + count]
            self._views.append(flat.view(self._num_blocks + 1, batch, tokens, self._hidden_size))
            if together:
                start += count

    def input_of(self, block: int, micro_batch: int) -> torch.Tensor:
        """Return the (B, T, D) input of ``block``; index L is the last block's output. A view."""
        return self._views[micro_batch][block]
