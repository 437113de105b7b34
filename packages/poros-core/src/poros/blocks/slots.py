"""Device slots and the copies that fill them.

The one rule: a copy into a slot starts after the slot's last reader, and a reader starts after the slot's copy. On
CUDA both are events between the copy stream and the compute stream, on the CPU they are the order of calls.

Of a block on the disk the copy is issued once its read is done: at the next call, at the latest when it is acquired.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from poros.blocks.disk_ring import DiskRead, DiskRing
from poros.blocks.host_memory import HostArena
from poros.blocks.store import BlockStore
from poros.clock import Stopwatch

__all__ = ["CopyStatistics", "CudaSlots", "HostSlots", "Slots", "make_slots"]

STAGING_BUFFERS = 2
# How often a visit that waits for the disk looks for copies that have left the ring.
POLL_SECONDS = 0.001


@dataclass(slots=True)
class CopyStatistics:
    """What a run moved since statistics were taken last.

    Attributes:
        h2d_bytes, d2h_bytes: to and from the device, blocks and activations.
        disk_bytes: of blocks that came from the disk.
        exposed_copy_seconds: how long visits waited for their blocks.
    """

    h2d_bytes: int = 0
    d2h_bytes: int = 0
    disk_bytes: int = 0
    exposed_copy_seconds: float = 0.0


class Slots(ABC):
    """A fixed set of device buffers, each holding one block at a time.

    Attributes:
        buffers: the slots, uint8 vectors as long as the largest block.
        contents: per slot, the block whose copy was issued last, or None.
    """

    def __init__(self, store: BlockStore, num_slots: int, device: torch.device) -> None:
        largest = max(layout.num_bytes for layout in store.layouts)
        self._store = store
        self.buffers = [torch.zeros(largest, dtype=torch.uint8, device=device) for _ in range(num_slots)]
        self.contents: list[int | None] = [None] * num_slots
        self._statistics = CopyStatistics()
        self.ring = DiskRing(store.files, pin=device.type == "cuda") if store.on_disk else None
        self._reads: dict[int, DiskRead] = {}  # by the slot that waits for it

    def announce(self, blocks: Iterable[int]) -> None:
        """Say which blocks the pass that begins will prefetch, in order, so that the disk is read ahead of it."""
        if self.ring is not None:
            self.ring.announce(block for block in blocks if block in self._store.on_disk)

    def prefetch(self, block: int, slot: int) -> None:
        """Issue the copy of ``block`` into ``slot``, ordered after the slot's last release."""
        self._statistics.h2d_bytes += self._store.layouts[block].num_bytes
        self.contents[slot] = None  # a copy that fails half-way leaves neither the old block nor the new one
        if block in self._store.on_disk:
            assert self.ring is not None
            self._statistics.disk_bytes += self._store.layouts[block].num_bytes
            if (unused := self._reads.pop(slot, None)) is not None:
                self.ring.give_back(unused)
            self._reads[slot] = self.ring.take(block)
            self._look_at_reads()
        else:
            self._copy(block, self._store.block(block), slot)
        self.contents[slot] = block

    def _look_at_reads(self) -> None:
        """Go on with what has come from the disk meanwhile."""
        if self.ring is not None:
            self._copy_what_was_read()
            self._reclaim()

    def _copy_what_was_read(self) -> None:
        """Issue the copies of blocks that have come from the disk. A read that failed waits for its visit."""
        for slot, read in list(self._reads.items()):
            if read.done and read.error is None:
                self._copy_read(slot)

    def _copy_read(self, slot: int) -> None:
        assert self.ring is not None
        read = self._reads.pop(slot)
        try:
            self._copy(read.block, self.ring.bytes(read), slot)
        except BaseException:
            self.contents[slot] = None
            self.ring.give_back(read)
            raise
        self._copy_issued(slot, read)

    def _wait_for_read(self, slot: int) -> None:
        """Have the copy of the slot's block issued, whatever the disk takes.

        Raises:
            CheckpointError: the disk failed, or the file changed.
        """
        if self.ring is None:
            return
        while (read := self._reads.get(slot)) is not None:
            if self.ring.wait(read, POLL_SECONDS):
                self._copy_read(slot)
            else:  # the reads before it may hold every buffer
                self._copy_what_was_read()
                self._reclaim()

    def _drop_reads(self) -> None:
        """Forget what was to come from the disk."""
        if self.ring is None:
            return
        for slot, read in self._reads.items():
            self.contents[slot] = None
            self.ring.give_back(read)
        self._reads.clear()
        self.ring.announce(())

    @abstractmethod
    def _copy(self, block: int, source: torch.Tensor, slot: int) -> None: ...

    @abstractmethod
    def _copy_issued(self, slot: int, read: DiskRead) -> None:
        """Give the ring's buffer back once the copy that was just issued has read it."""

    @abstractmethod
    def _reclaim(self) -> None:
        """Give back the buffers whose copies have ended meanwhile."""

    @abstractmethod
    def acquire(self, slot: int) -> None:
        """Order everything issued from here on after the slot's copy.

        Raises:
            CheckpointError: the block's file could not be read, or changed.
        """

    @abstractmethod
    def release(self, slot: int) -> None:
        """Everything issued so far has read the slot: later copies may overwrite it."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until no copy is pending, so that a new pass starts from known contents."""

    def close(self) -> None:
        """Drain, and stop what reads the disk."""
        self.drain()
        if self.ring is not None:
            self.ring.close()

    def take_statistics(self) -> CopyStatistics:
        """Return and reset the counters. Call at a point where the device is idle."""
        taken, self._statistics = self._statistics, CopyStatistics()
        return taken


class HostSlots(Slots):
    """Slots on the CPU. Copies run when issued, or, with ``lazy``, only when the slot is acquired.

    Both are legal schedules of an asynchronous copy, the earliest and the latest; gates run both, because a missing
    wait is invisible in the first.
    """

    def __init__(
        self, store: BlockStore, num_slots: int, device: torch.device, *, lazy: bool = False
    ) -> None:
        super().__init__(store, num_slots, device)
        self._lazy = lazy
        self._pending: dict[int, torch.Tensor] = {}

    def _copy(self, block: int, source: torch.Tensor, slot: int) -> None:
        self._pending[slot] = source
        if not self._lazy:
            self._finish(slot)

    def _copy_issued(self, slot: int, read: DiskRead) -> None:
        assert self.ring is not None
        self._finish(slot)
        self.ring.give_back(read)

    def _reclaim(self) -> None:
        """Copies end before `_copy_issued` returns."""

    def _look_at_reads(self) -> None:
        if not self._lazy:
            super()._look_at_reads()

    def _finish(self, slot: int) -> None:
        source = self._pending.pop(slot, None)
        if source is not None:
            watch = Stopwatch()
            self.buffers[slot][: source.numel()].copy_(source)
            self._statistics.exposed_copy_seconds += watch.seconds

    def acquire(self, slot: int) -> None:
        """See `Slots.acquire`."""
        watch, exposed = Stopwatch(), self._statistics.exposed_copy_seconds
        self._wait_for_read(slot)
        self._finish(slot)
        self._statistics.exposed_copy_seconds = exposed + watch.seconds

    def release(self, slot: int) -> None:
        """Calls are ordered on the CPU: nothing to record."""
        self._look_at_reads()

    def drain(self) -> None:
        """See `Slots.drain`."""
        self._drop_reads()
        for slot in list(self._pending):
            self._finish(slot)


class CudaSlots(Slots):
    """Slots on a GPU, filled by a copy stream of their own."""

    def __init__(self, store: BlockStore, num_slots: int, device: torch.device) -> None:
        super().__init__(store, num_slots, device)
        self._device = device
        self.copy_stream = torch.cuda.Stream(device)
        self._filled: list[torch.cuda.Event | None] = [None] * num_slots
        self._released: list[torch.cuda.Event | None] = [None] * num_slots
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._leaving: list[tuple[torch.cuda.Event, DiskRead]] = []  # copies out of the ring
        self._staging = _StagingRing(store, device) if _needs_staging(store) else None
        # The slots' zeros were written on the compute stream.
        self.copy_stream.wait_stream(torch.cuda.current_stream(device))

    def _copy(self, block: int, source: torch.Tensor, slot: int) -> None:
        with torch.cuda.stream(self.copy_stream):
            if (released := self._released[slot]) is not None:
                self.copy_stream.wait_event(released)
            target = self.buffers[slot][: source.numel()]
            staged = block not in self._store.on_disk and not self._store.is_pinned(block)
            if self._staging is not None and staged:
                self._staging.copy(source, target)
            else:
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.copy_stream)
        self._filled[slot] = event

    def _copy_issued(self, slot: int, read: DiskRead) -> None:
        filled = self._filled[slot]
        assert filled is not None
        self._leaving.append((filled, read))

    def _reclaim(self) -> None:
        assert self.ring is not None
        while self._leaving and self._leaving[0][0].query():  # in the order of the copy stream
            self.ring.give_back(self._leaving.pop(0)[1])

    def acquire(self, slot: int) -> None:
        """See `Slots.acquire`. Two timing events bracket the wait: their distance is exposed copy time."""
        stream = torch.cuda.current_stream(self._device)
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        self._wait_for_read(slot)
        if (filled := self._filled[slot]) is not None:
            stream.wait_event(filled)
        after.record(stream)
        self._waits.append((before, after))

    def release(self, slot: int) -> None:
        """See `Slots.release`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._released[slot] = event
        self._look_at_reads()

    def drain(self) -> None:
        """See `Slots.drain`."""
        self._drop_reads()
        self.copy_stream.synchronize()
        if self.ring is not None:
            self._reclaim()

    def take_statistics(self) -> CopyStatistics:
        """See `Slots.take_statistics`."""
        self._statistics.exposed_copy_seconds = sum(a.elapsed_time(b) for a, b in self._waits) / 1000
        self._waits.clear()
        return super().take_statistics()


def _needs_staging(store: BlockStore) -> bool:
    indices = [index for index in range(len(store.layouts)) if index not in store.on_disk]
    return any(store.block(index).device.type == "cpu" and not store.is_pinned(index) for index in indices)


class _StagingRing:
    """Pinned buffers between pageable blocks and the copy engine."""

    def __init__(self, store: BlockStore, device: torch.device) -> None:
        largest = max(layout.num_bytes for layout in store.layouts)
        self._arena = HostArena([largest] * STAGING_BUFFERS, pin=True)
        self._device = device
        self._done: list[torch.cuda.Event | None] = [None] * STAGING_BUFFERS
        self._next = 0

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy pageable ``source`` to ``target`` on the current stream, holding the host for the first half only."""
        index = self._next
        self._next = (index + 1) % STAGING_BUFFERS
        if (done := self._done[index]) is not None:
            done.synchronize()
        staged = self._arena.region(index)[: source.numel()]
        staged.copy_(source)
        target.copy_(staged, non_blocking=self._arena.pinned[index])
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._done[index] = event


def make_slots(store: BlockStore, num_slots: int, device: torch.device) -> Slots:
    """Return the slots of ``device``."""
    return (
        CudaSlots(store, num_slots, device) if device.type == "cuda" else HostSlots(store, num_slots, device)
    )
