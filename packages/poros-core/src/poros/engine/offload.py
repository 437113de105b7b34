"""Boundary activations in pinned host memory, behind a small ring of rows on the device.

Rows leave on the way down, in the direction of the link that streaming weights does not use, and come back on the way
up one visit ahead. Copies have no rounding: where a row waited changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from poros.blocks.copy_lane import CopyLane, mark, wait
from poros.blocks.host_memory import HostArena
from poros.engine.activations import Rows, Shape

__all__ = ["NUM_RING_ROWS", "HostActivations"]

# One is read, one written, and two copies may be on their way.
NUM_RING_ROWS = 4


class HostActivations:
    """See `poros.engine.activations.BoundaryActivations`.

    The last rows of the way down stay in the ring: they are the first ones needed on the way up.

    Attributes:
        offloaded_bytes, loaded_bytes: moved so far.

    Args:
        num_blocks: L.
        hidden_size: D.
        device: where blocks run.
        dtype: dtype of hidden states.
    """

    def __init__(self, num_blocks: int, hidden_size: int, device: torch.device, dtype: torch.dtype) -> None:
        self._num_blocks = num_blocks
        self._hidden_size = hidden_size
        self._device, self._dtype = device, dtype
        self._ring = torch.empty(0, device=device, dtype=dtype)
        self._arena: HostArena | None = None
        self._host = torch.empty(0, dtype=dtype)
        self._down, self._up = CopyLane(device), CopyLane(device)
        self._lowest: int | None = None
        self.offloaded_bytes = self.loaded_bytes = 0
        self._forget()

    def _forget(self) -> None:
        self._place: dict[int, int] = {}  # boundary -> row of the ring
        self._events: dict[int, torch.cuda.Event | None] = {}  # boundary -> its last copy
        self._dead: dict[int, torch.cuda.Event | None] = {}  # row of the ring -> its last reader

    def begin(self, shapes: Sequence[Shape], *, together: bool, lowest_backward: int | None) -> None:
        """See `BoundaryActivations.begin`."""
        self._rows = Rows(shapes, self._hidden_size, together=together)
        self._lowest = lowest_backward
        if NUM_RING_ROWS * self._rows.size > self._ring.numel():
            self._ring = torch.empty(0, device=self._device, dtype=self._dtype)
            self._ring = torch.empty(NUM_RING_ROWS * self._rows.size, device=self._device, dtype=self._dtype)
        needed = self._num_blocks * self._rows.size
        if lowest_backward is not None and needed > self._host.numel():
            self.close()
            self._arena = HostArena([needed * self._dtype.itemsize], pin=self._device.type == "cuda")
            self._host = self._arena.region(0).view(self._dtype)

    def enter(self, block: int, direction: str) -> None:
        """See `BoundaryActivations.enter`. A backward visit also calls for the rows of the next ones."""
        if direction == "forward":
            if block == 0:
                self._forget()
                self._allocate(0)
            self._allocate(block + 1)
            return
        for boundary in range(block, max(block - NUM_RING_ROWS + 1, self._lowest or 0) - 1, -1):
            if boundary not in self._place and not self._load(boundary):
                break
        wait(self._device, self._events.get(block))

    def leave(self, block: int, direction: str) -> None:
        """See `BoundaryActivations.leave`."""
        if direction == "backward":
            # The boundary above was read by the visit before this one, or by the loss.
            for boundary in (block + 1, block):
                row = self._place.pop(boundary, None)
                if row is not None:
                    self._dead[row] = mark(self._device)
        elif self._lowest is not None and self._lowest <= block <= self._num_blocks - NUM_RING_ROWS:
            self._events[block] = self._down.copy(
                self._host_row(block), self._row(self._place[block]), after=[mark(self._device)]
            )
            self.offloaded_bytes += self._rows.size * self._dtype.itemsize

    def _allocate(self, boundary: int) -> None:
        """Give a boundary of the way down a row; the one that is needed last makes room."""
        free = set(range(NUM_RING_ROWS)) - set(self._place.values())
        if not free:
            evicted = min(self._place)
            wait(self._device, self._events.get(evicted))
            free = {self._place.pop(evicted)}
        self._place[boundary] = min(free)

    def _load(self, boundary: int) -> bool:
        """Start the way back of a boundary; False where no row is free yet."""
        free = set(range(NUM_RING_ROWS)) - set(self._place.values())
        if not free:
            return False
        row = min(free)
        after = [self._events.get(boundary), self._dead.get(row)]
        self._events[boundary] = self._up.copy(self._row(row), self._host_row(boundary), after=after)
        self._place[boundary] = row
        self.loaded_bytes += self._rows.size * self._dtype.itemsize
        return True

    def state(self, boundary: int, micro_batch: int) -> torch.Tensor:
        """See `BoundaryActivations.state`."""
        return self._rows.view(self._row(self._place[boundary]), micro_batch)

    def _row(self, row: int) -> torch.Tensor:
        return self._ring[row * self._rows.size : (row + 1) * self._rows.size]

    def _host_row(self, boundary: int) -> torch.Tensor:
        return self._host[boundary * self._rows.size : (boundary + 1) * self._rows.size]

    def close(self) -> None:
        """Release the page lock."""
        if self._arena is not None:
            self._arena.close()
