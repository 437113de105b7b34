"""Boundary activations on the device: the input of every block of every micro-batch, in one buffer that is reused.

Shape letters: B batch, T tokens, D hidden size, L blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

__all__ = ["BoundaryActivations", "DeviceActivations", "Rows"]

Shape = tuple[int, int]


class BoundaryActivations(Protocol):
    """Boundary ``k`` is the input of block ``k``; boundary L is the last block's output.

    A visit is bracketed by `enter` and `leave`; between them the boundaries that it reads and writes are on the device.
    """

    def begin(self, shapes: Sequence[Shape], *, together: bool, lowest_backward: int | None) -> None:
        """Start a pass over micro-batches of these (B, T) shapes.

        Args:
            shapes: per micro-batch.
            together: every micro-batch is alive at once; otherwise they share the memory of the largest.
            lowest_backward: the lowest block with a backward visit; None for a forward-only pass.
        """
        ...

    def enter(self, block: int, direction: str) -> None:
        """Order what follows after the arrival of the boundaries of a visit."""
        ...

    def leave(self, block: int, direction: str) -> None:
        """Everything of the visit has been issued."""
        ...

    def state(self, boundary: int, micro_batch: int) -> torch.Tensor:
        """Return the (B, T, D) hidden states of a boundary. A view."""
        ...


class Rows:
    """How the micro-batches of a pass lie in one boundary's flat row."""

    def __init__(self, shapes: Sequence[Shape], hidden_size: int, *, together: bool) -> None:
        counts = [batch * tokens * hidden_size for batch, tokens in shapes]
        self._shapes = [(batch, tokens, hidden_size) for batch, tokens in shapes]
        starts = [sum(counts[:index]) if together else 0 for index in range(len(counts))]
        self._places = list(zip(starts, counts, strict=True))
        self.size = sum(counts) if together else max(counts, default=0)

    def view(self, row: torch.Tensor, micro_batch: int) -> torch.Tensor:
        """Return the (B, T, D) part of a micro-batch."""
        start, count = self._places[micro_batch]
        return row[start : start + count].view(self._shapes[micro_batch])


class DeviceActivations:
    """L + 1 rows in device memory, carved out of a flat buffer that grows to the largest pass.

    Args:
        num_blocks: L.
        hidden_size: D.
        device: where they are kept.
        dtype: dtype of hidden states.
    """

    def __init__(self, num_blocks: int, hidden_size: int, device: torch.device, dtype: torch.dtype) -> None:
        self._num_rows = num_blocks + 1
        self._hidden_size = hidden_size
        self._device, self._dtype = device, dtype
        self._buffer = torch.empty(0, device=device, dtype=dtype)

    def begin(self, shapes: Sequence[Shape], *, together: bool, lowest_backward: int | None) -> None:
        """See `BoundaryActivations.begin`."""
        self._rows = Rows(shapes, self._hidden_size, together=together)
        needed = self._num_rows * self._rows.size
        if needed > self._buffer.numel():
            # Let the old one go before the new one comes.
            self._buffer = torch.empty(0, device=self._device, dtype=self._dtype)
            self._buffer = torch.empty(needed, device=self._device, dtype=self._dtype)

    def enter(self, block: int, direction: str) -> None:
        """Nothing moves."""

    def leave(self, block: int, direction: str) -> None:
        """Nothing moves."""

    def state(self, boundary: int, micro_batch: int) -> torch.Tensor:
        """See `BoundaryActivations.state`."""
        start = boundary * self._rows.size
        return self._rows.view(self._buffer[start : start + self._rows.size], micro_batch)
