"""A ring of host buffers that reader threads fill from the disk, ahead of the copies to the device.

All readers work on the parts of one block, then on those of the next: blocks come one after another, in order.

A buffer belongs to one block from the start of its read until `DiskRing.give_back`, which is called once the copy has
read it; only then may another block's read overwrite it. Reader threads never call CUDA: a capture on the main thread
would not allow it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from poros.blocks.block_file import BlockFile, Version
from poros.blocks.host_memory import HostArena

__all__ = ["READERS", "RING_BUFFERS", "DiskRead", "DiskRing"]

# Reads in flight. While the interpreter is free, nothing tells 1 to 8 apart; beside a thread that keeps it busy, as a
# training loop does, 1 and 2 were slower than 4, and 8 no faster than the noise (`validation/receipts/disk-rate.json`).
READERS = 4
RING_BUFFERS = 4


@dataclass(slots=True, eq=False)
class DiskRead:
    """One block on its way from the disk.

    Attributes:
        buffer: of the ring, None until a reader begins and after it failed.
        begun, ended: how many of its parts.
        versions: of the file, before each part.
        done: the readers are finished, with or without ``error``.
        dropped: nobody wants it any more.
    """

    block: int
    buffer: int | None = None
    begun: int = 0
    ended: int = 0
    versions: set[Version] = field(default_factory=set)
    done: bool = False
    dropped: bool = False
    error: BaseException | None = None


class DiskRing:
    """Reads announced blocks in order, as far ahead as there are buffers.

    Args:
        files: by block.
        pin: page-lock the buffers.

    Memory:
        `RING_BUFFERS` of the largest block.
    """

    def __init__(self, files: Mapping[int, BlockFile], *, pin: bool) -> None:
        self._files = files
        largest = max(file.buffer_bytes for file in files.values())
        self._arena = HostArena([largest] * RING_BUFFERS, pin=pin, huge_pages=True)
        self._free = list(range(RING_BUFFERS))
        self._ahead: deque[DiskRead] = deque()  # announced, not taken
        self._queue: deque[DiskRead] = deque()  # parts of the first may have begun
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._read, name=f"poros-disk-{index}", daemon=True)
            for index in range(READERS)
        ]
        for thread in self._threads:
            thread.start()

    def announce(self, blocks: Iterable[int]) -> None:
        """Say which blocks a pass takes, in order; what was announced before is forgotten."""
        with self._changed:
            self._forget()
            self._add(blocks)

    def take(self, block: int) -> DiskRead:
        """Return the read of ``block``. One that is not the next of those announced begins now."""
        with self._changed:
            if not self._ahead or self._ahead[0].block != block:
                self._forget()
                self._add([block])
            return self._ahead.popleft()

    def wait(self, read: DiskRead, seconds: float) -> bool:
        """Wait at most so long; return whether the read is done, with or without an error."""
        with self._changed:
            return self._changed.wait_for(lambda: read.done, seconds)

    def bytes(self, read: DiskRead) -> torch.Tensor:
        """Return the (num_bytes,) uint8 bytes of a read that is done: a view of its buffer.

        Raises:
            CheckpointError: the read failed; see `BlockFile.read_part` and `BlockFile.check`.
        """
        assert read.done
        if read.error is not None:
            raise read.error
        return self._block(read)

    def give_back(self, read: DiskRead) -> None:
        """Let another read have the buffer. Call once per taken read, when nothing reads its bytes any more."""
        with self._changed:
            self._drop(read)

    def close(self) -> None:
        """Stop the readers, at the end of the parts that they are reading, and release page locks."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._arena.close()

    def _add(self, blocks: Iterable[int]) -> None:
        reads = [DiskRead(block) for block in blocks]
        self._ahead.extend(reads)
        self._queue.extend(reads)
        self._changed.notify_all()

    def _forget(self) -> None:
        while self._ahead:
            self._drop(self._ahead.popleft())

    def _drop(self, read: DiskRead) -> None:
        assert not read.dropped
        read.dropped = True
        if not read.done and read.buffer is None:
            self._queue.remove(read)
        elif read.done and read.buffer is not None:
            self._release(read)
        # else its readers see to it, or saw to it

    def _release(self, read: DiskRead) -> None:
        assert read.buffer is not None
        self._free.append(read.buffer)
        read.buffer = None
        self._changed.notify_all()

    def _region(self, read: DiskRead) -> torch.Tensor:
        assert read.buffer is not None
        return self._arena.region(read.buffer)

    def _block(self, read: DiskRead) -> torch.Tensor:
        return self._files[read.block].block_in(self._region(read))

    def _read(self) -> None:
        while (found := self._begin_part()) is not None:
            read, part = found
            file = self._files[read.block]
            try:
                read.versions.add(file.read_part(part, self._region(read)))
            except BaseException as error:  # raised again where the block is needed
                read.error = error
            with self._changed:
                read.ended += 1
                last = read.ended == file.num_parts
            if last:
                self._finish(read)

    def _begin_part(self) -> tuple[DiskRead, int] | None:
        """Return the next part to read, once there is one and a buffer for it; None when the ring closes."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or (self._queue and (self._queue[0].begun or self._free))
            )
            if self._closed:
                return None
            read = self._queue[0]
            if not read.begun:
                read.buffer = self._free.pop()
            part = read.begun
            read.begun += 1
            if read.begun == self._files[read.block].num_parts:
                self._queue.popleft()
            return read, part

    def _finish(self, read: DiskRead) -> None:
        """Check a block whose last part has ended; the other readers are at the next one meanwhile."""
        if read.error is None and not read.dropped:
            try:
                self._files[read.block].check(self._block(read), read.versions)
            except BaseException as error:  # raised again where the block is needed
                read.error = error
        with self._changed:
            read.done = True
            if read.dropped or read.error is not None:
                self._release(read)
            self._changed.notify_all()
