"""One block of a cached store, read again and again while a run streams it from the disk."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path

import torch

from poros.blocks.layout import align
from poros.checkpoint import read_header
from poros.errors import CheckpointError, explain

__all__ = ["BLOCK_TENSOR", "PART_BYTES", "BlockFile", "Version", "reopen_past_page_cache"]

# The one tensor of a block's file.
BLOCK_TENSOR = "block"
# What is read by one call, at most. Beside a thread that keeps the interpreter busy, as a training loop does, a reader
# gets it back late after every call: there parts of 8 MiB were slower than these, and whole blocks no faster than the
# noise (`validation/receipts/disk-rate.json`).
PART_BYTES = 32 * 2**20
# Of addresses, offsets and lengths of reads past the page cache.
SECTOR_BYTES = 4096
# Size and time of change of a file.
Version = tuple[int, int]


def reopen_past_page_cache(descriptor: int) -> int:
    """Return another descriptor of an open file, whose reads go past the page cache where the system can do that.

    A block that is streamed is needed again after all others, when a cache too small for them has long dropped it;
    what fits into memory is there already. Reads past the cache cost the processor no copy.
    """
    try:
        # By this name it is the same file even if another one has taken its path.
        direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:  # not Linux; a file system that refuses
        return os.dup(descriptor)
    try:
        os.preadv(direct, [mmap.mmap(-1, SECTOR_BYTES)], 0)
    except OSError:  # one that refuses later, or asks for larger sectors
        os.close(direct)
        return os.dup(descriptor)
    return direct


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _make_again(path: Path) -> str:
    return f"Remove `{path.parent}`: the next start makes the store again, and a run goes on with `--resume`"


class BlockFile:
    """A block's file, open for the whole run.

    Another run may replace or remove the folder meanwhile: what is open stays what it was. The hash is checked when the
    block is first read, and again whenever the file's size or time of change is another than at the last check.

    Attributes:
        path: the file.
        num_bytes: of the block.
        num_parts: calls of `read_part` that bring the whole block.
        buffer_bytes: of a buffer for them: the whole sectors that hold the block.
    """

    def __init__(self, path: Path, num_bytes: int, expected_hash: str) -> None:
        """Open the file.

        Raises:
            CheckpointError: it is missing, truncated, or holds something else than a block of ``num_bytes``.
        """
        header = read_header(path)
        entry = header.tensors.get(BLOCK_TENSOR)
        if entry is None or entry.num_bytes != num_bytes:
            raise CheckpointError(
                explain(
                    "A cached block does not fit the model",
                    expected=f"tensor `{BLOCK_TENSOR}` of {num_bytes} bytes",
                    got="none" if entry is None else f"{entry.num_bytes} bytes",
                    where=str(path),
                    next_step=_make_again(path),
                )
            )
        self.path, self.num_bytes = path, num_bytes
        self._begin, self._expected_hash = entry.begin, expected_hash
        self._lead = entry.begin % SECTOR_BYTES  # the block in a buffer of whole sectors
        self.buffer_bytes = align(self._lead + num_bytes, SECTOR_BYTES)
        self.num_parts = -(-self.buffer_bytes // PART_BYTES)
        with self._errors():
            self._descriptor = os.open(path, os.O_RDONLY)
            self._direct = reopen_past_page_cache(self._descriptor)
        self.close = weakref.finalize(self, _close, self._descriptor, self._direct)
        self._verified: Version | None = None

    def read_into(self, target: torch.Tensor) -> None:
        """Fill ``target``, (num_bytes,) uint8 on the CPU, and check it. Several threads may read at the same time.

        Raises:
            CheckpointError: the disk fails, the file ends early, or its bytes are not those that were written.
        """
        view = memoryview(target.numpy().data)
        with self._errors():
            before = self._version()
            for start in range(0, self.num_bytes, PART_BYTES):
                self._read(self._descriptor, view[start : start + PART_BYTES], self._begin + start)
        self.check(target, {before})

    def read_part(self, part: int, buffer: torch.Tensor) -> Version:
        """Fill one part of ``buffer``, past the page cache if possible. Several threads may read parts at a time.

        Args:
            part: below ``num_parts``.
            buffer: (buffer_bytes,) uint8 on the CPU, from the beginning of a page on.

        Returns:
            The file's version before the read, for `check`.

        Raises:
            CheckpointError: the disk fails, or the file ends early.
        """
        start = part * PART_BYTES
        view = memoryview(buffer.numpy().data)[start : min(start + PART_BYTES, self.buffer_bytes)]
        with self._errors():
            before = self._version()
            self._read(self._direct, view, self._begin - self._lead + start)
        return before

    def block_in(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the (num_bytes,) block in a buffer whose parts have been read. A view."""
        return buffer[self._lead : self._lead + self.num_bytes]

    def check(self, block: torch.Tensor, before: Collection[Version]) -> None:
        """Hash a block that was read, unless its file is as it was at the last check.

        Args:
            block: (num_bytes,) uint8 on the CPU.
            before: the file's versions before each of the reads.

        Raises:
            CheckpointError: its bytes are not those that were written.
        """
        with self._errors():
            versions = {*before, self._version()}
        if versions != {self._verified}:
            self._check_hash(hashlib.sha256(block.numpy().data).hexdigest())
            # Written to while it was read: the next read may find something else.
            self._verified = versions.pop() if len(versions) == 1 else None

    def _read(self, descriptor: int, view: memoryview, position: int) -> None:
        """Fill ``view`` from ``position`` on, or up to the block's end if that comes first."""
        done, needed = 0, min(len(view), self._begin + self.num_bytes - position)
        while done < needed:
            # A read that ended within a sector goes on through the page cache.
            source = descriptor if done % SECTOR_BYTES == 0 else self._descriptor
            count = os.preadv(source, [view[done:]], position + done)
            if not count:
                raise self._ended_early()
            done += count

    def _check_hash(self, got: str) -> None:
        if got != self._expected_hash:
            raise CheckpointError(
                explain(
                    "A cached block changed",
                    expected=f"SHA-256 {self._expected_hash}",
                    got=got,
                    where=str(self.path),
                    next_step=_make_again(self.path),
                )
            )

    def _version(self) -> Version:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                explain(
                    "Cannot read a cached block",
                    expected=f"{self.num_bytes} bytes",
                    got=error.strerror or str(error),
                    where=str(self.path),
                    next_step=f"Check the disk. {_make_again(self.path)}",
                )
            ) from error

    def _ended_early(self) -> CheckpointError:
        size, _ = self._version()
        return CheckpointError(
            explain(
                "A cached block ended early",
                expected=f"{self.num_bytes} bytes",
                got=f"{max(0, size - self._begin)}: the file was cut while the run reads it",
                where=str(self.path),
                next_step=_make_again(self.path),
            )
        )
