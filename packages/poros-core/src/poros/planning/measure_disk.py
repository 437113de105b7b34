"""How fast a folder's disk delivers blocks, measured with the reads of a run."""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from poros.blocks.block_file import PART_BYTES, reopen_past_page_cache
from poros.blocks.disk_ring import READERS
from poros.blocks.host_memory import HostArena
from poros.clock import Stopwatch

__all__ = ["drop_cached_pages", "measure_disk_rate"]

# Long enough that the first seek does not count, short enough for a spinning disk (about two seconds).
SAMPLE_BYTES = 256 * 2**20
LEAST_SECONDS = 1e-9


def measure_disk_rate(folder: Path) -> float | None:
    """Return the bytes per second that reader threads get from ``folder``; None where nothing can be read there.

    Blocks of a store that lies there are read, or else a file that is written for it and removed: past the page cache,
    or with their pages dropped from it first, where the system does so. A memory file system, or a disk with a cache of
    its own, answers with that one's rate.
    """
    try:
        stored = sorted(folder.glob("*/block-*.safetensors"))
        if sum(path.stat().st_size for path in stored) >= SAMPLE_BYTES:
            return _read_rate(stored)
        folder.mkdir(parents=True, exist_ok=True)
        sample = folder / f".rate-{secrets.token_hex(4)}"
        try:
            _write_sample(sample)
            return _read_rate([sample])
        finally:
            sample.unlink(missing_ok=True)
    except OSError:  # read-only, full, gone: loading says what is wrong with it, if anything is
        return None


def drop_cached_pages(path: Path) -> None:
    """Ask the system to forget a file's pages, so that the next read comes from the disk."""
    if not hasattr(os, "posix_fadvise"):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # dirty pages stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _write_sample(path: Path) -> None:
    piece = os.urandom(PART_BYTES)  # zeros would be a hole, or compressed
    with path.open("xb") as file:
        for _ in range(SAMPLE_BYTES // PART_BYTES):
            file.write(piece)


def _read_rate(paths: Sequence[Path]) -> float:
    """Read `SAMPLE_BYTES` of the files as the ring does, several parts at a time."""
    parts = [(path, begin) for path in paths for begin in range(0, path.stat().st_size, PART_BYTES)]
    parts = parts[: SAMPLE_BYTES // PART_BYTES]
    for path in {path for path, _ in parts}:
        drop_cached_pages(path)
    arena = HostArena([PART_BYTES] * READERS, pin=False, huge_pages=True)
    buffers = deque(
        arena.region(index).fill_(0) for index in range(READERS)
    )  # with their pages, as after a block

    def read(part: tuple[Path, int]) -> int:
        buffer = buffers.pop()
        try:
            return _read_part(*part, buffer)
        finally:
            buffers.append(buffer)

    watch = Stopwatch()
    with ThreadPoolExecutor(READERS) as threads:
        num_bytes = sum(threads.map(read, parts))
    return num_bytes / max(watch.seconds, LEAST_SECONDS)


def _read_part(path: Path, begin: int, buffer: torch.Tensor) -> int:
    with path.open("rb", buffering=0) as file:
        direct = reopen_past_page_cache(file.fileno())
        try:
            return os.preadv(direct, [memoryview(buffer.numpy().data)], begin)
        finally:
            os.close(direct)
