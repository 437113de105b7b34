"""The disk tier's reads against the disk's own rate: one receipt.

    python validation/bench/disk_rate.py --folder FOLDER --output validation/receipts

A store of random blocks is written into FOLDER and read whole in several ways, one after the other within every round:
by plain sequential reads, through the page cache and past it, and through the ring under its own settings and others.
Before each way the store's pages are dropped from the page cache and as much memory as the store takes is written and
given back. Nothing is copied to a device.

Two floors are measured in the same rounds, the better plain way and how fast one thread hashes a block, and what they
predict for the ring stands beside what it did.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from poros.blocks import block_file, disk_ring
from poros.blocks.block_file import PART_BYTES, BlockFile, reopen_past_page_cache
from poros.blocks.disk_ring import READERS, RING_BUFFERS, DiskRing
from poros.blocks.host_memory import HostArena
from poros.blocks.layout import BlockLayout, make_layout
from poros.blocks.placement import PlacedStore
from poros.blocks.store_cache import StoreCache
from poros.clock import Stopwatch
from poros.interfaces import TensorSpec
from poros.parity.receipts import write_receipt
from poros.planning.measure_disk import drop_cached_pages, measure_disk_rate
from poros.units import GB

CPU = torch.device("cpu")
KEY = "bench"
LONG_ENOUGH = 600.0
MIB = 2**20
METHOD = (
    "Before every way: fsync and posix_fadvise(POSIX_FADV_DONTNEED) of every block; then anonymous memory as large as "
    "the store is written and unmapped, because the host of a virtual machine may have taken free pages back, and "
    "whoever touches such a page next waits for it (10 us each where this was seen, so that a plain read through the "
    "page cache took five times as long). Ways go in another order in every round. Caches of the disk, or of the "
    "host, cannot be dropped from here. `cpu_seconds` are the process's, a round; with `busy_interpreter` another "
    "thread runs Python all the while."
)


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way of reading the store through the ring.

    Attributes:
        hashed: every block is hashed, as in a run's first pass.
        busy_interpreter: another thread runs Python all the while, as a training loop does.
        direct: past the page cache.
        huge_pages: buffers are made of them where the system gives them.
        scattered: small pages lie apart in the machine's memory, as where it has long been in use.
    """

    readers: int = READERS
    part_bytes: int = PART_BYTES
    hashed: bool = False
    busy_interpreter: bool = False
    direct: bool = True
    huge_pages: bool = True
    scattered: bool = False


OWN = Way()
# Readers, and MiB of a part; 512 is a whole block.
SETTINGS = [(1, 32), (2, 32), (4, 8), (4, 512), (8, 32)]
RING_WAYS = {
    "ring": OWN,
    "ring_first_pass": replace(OWN, hashed=True),
    "ring_through_page_cache": replace(OWN, direct=False),
    "ring_small_pages": replace(OWN, huge_pages=False),
    "ring_scattered_pages": replace(OWN, huge_pages=False, scattered=True),
    "ring_busy_interpreter": replace(OWN, busy_interpreter=True),
    **{
        f"ring_{readers}_readers_{mib}_mib{'_busy_interpreter' if busy else ''}": Way(
            readers=readers, part_bytes=mib * MIB, busy_interpreter=busy
        )
        for busy in (False, True)
        for readers, mib in SETTINGS
    },
}


def make_store(folder: Path, layout: BlockLayout, num_blocks: int) -> PlacedStore:
    """Write a store whose blocks all lie on the disk, and open it."""
    store = PlacedStore(
        [layout] * num_blocks, frozenset(), CPU, pin=False, on_disk=frozenset(range(num_blocks))
    )

    def fill(index: int, target: torch.Tensor) -> None:
        # Through random 64-bit words, which are quick to make; no two blocks alike.
        words = target[: target.numel() // 8 * 8].view(torch.int64)
        words.random_(generator=torch.Generator().manual_seed(index))

    StoreCache(folder).fill(KEY, store, num_blocks, fill)
    return store


def with_pages(arena: HostArena, num_regions: int) -> HostArena:
    """Write to every page, as a run's first blocks do."""
    for index in range(num_regions):
        arena.region(index).fill_(1)
    return arena


@dataclass(frozen=True)
class Taken:
    """What one reading of the whole store took."""

    gb_per_second: float
    cpu_seconds: float


class Bench:
    """Ways of reading one store.

    Attributes:
        drop: its pages leave the page cache before it is read.
    """

    def __init__(self, folder: Path, layout: BlockLayout, num_blocks: int) -> None:
        self.num_blocks, self.total = num_blocks, num_blocks * layout.num_bytes
        self._layout = layout
        store = make_store(folder, layout, num_blocks)
        self._paths = [store.files[index].path for index in range(num_blocks)]
        self._hashes = [store.files[index]._expected_hash for index in range(num_blocks)]
        store.close()
        self.drop = True

    def plainly(self, *, direct: bool) -> Taken:
        """Read the files one after another, by one thread, in large pieces, into one buffer."""
        buffer = with_pages(HostArena([PART_BYTES], pin=False, huge_pages=True), 1).region(0)
        view = memoryview(buffer.numpy().data)

        def read() -> None:
            for path in self._paths:
                with path.open("rb", buffering=0) as file:
                    descriptor = reopen_past_page_cache(file.fileno()) if direct else os.dup(file.fileno())
                    try:
                        position = 0
                        while count := os.preadv(descriptor, [view], position):
                            position += count
                            if position % block_file.SECTOR_BYTES:  # the end of a file
                                break
                    finally:
                        os.close(descriptor)

        return self._timed(read)

    def through_ring(self, way: Way) -> Taken:
        """Take every block in order; one that has come goes back at once, as if its copy took no time."""
        with self._opened(way) as ring:

            def read() -> None:
                ring.announce(range(self.num_blocks))
                for block in range(self.num_blocks):
                    taken = ring.take(block)
                    assert ring.wait(taken, LONG_ENOUGH)
                    ring.bytes(taken)
                    ring.give_back(taken)

            with busy_interpreter() if way.busy_interpreter else contextlib.nullcontext():
                return self._timed(read)

    def hashing(self) -> float:
        """Return the GB/s of one thread that hashes a block in memory."""
        block = torch.ones(self._layout.num_bytes, dtype=torch.uint8)
        watch = Stopwatch()
        hashlib.sha256(block.numpy().data)
        return block.numel() / watch.seconds / GB

    @contextlib.contextmanager
    def _opened(self, way: Way) -> Iterator[DiskRing]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(patch.object(disk_ring, "READERS", way.readers))
            stack.enter_context(patch.object(block_file, "PART_BYTES", way.part_bytes))
            if not way.direct:
                stack.enter_context(patch.object(block_file, "reopen_past_page_cache", os.dup))
            if not way.huge_pages:
                small = lambda sizes, *, pin, huge_pages: HostArena(sizes, pin=pin)  # noqa: E731
                stack.enter_context(patch.object(disk_ring, "HostArena", small))
            files = {
                index: BlockFile(path, self._layout.num_bytes, expected)
                for index, (path, expected) in enumerate(zip(self._paths, self._hashes, strict=True))
            }
            for file in files.values():
                stack.callback(file.close)
                if not way.hashed:
                    file._verified = file._version()
            ring = DiskRing(files, pin=False)
            stack.callback(ring.close)
            # Holes for every page of the ring, or for none.
            with scattered_pages(ring._arena.total_bytes * way.scattered):
                with_pages(ring._arena, RING_BUFFERS)
                yield ring

    def _timed(self, read: Callable[[], None]) -> Taken:
        if self.drop:
            for path in self._paths:
                drop_cached_pages(path)
            with_pages(HostArena([self.total], pin=False, huge_pages=True), 1)
        cpu, watch = time.process_time(), Stopwatch()
        read()
        return Taken(self.total / watch.seconds / GB, time.process_time() - cpu)


@contextlib.contextmanager
def scattered_pages(num_bytes: int) -> Iterator[None]:
    """Give so many bytes back to the system, every other page of twice as many, and hold the rest meanwhile."""
    if not num_bytes:
        yield
        return
    with mmap.mmap(-1, 2 * num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        for start in range(0, len(held), mmap.PAGESIZE):
            held[start] = 1
        for start in range(0, len(held), 2 * mmap.PAGESIZE):
            held.madvise(mmap.MADV_DONTNEED, start, mmap.PAGESIZE)
        yield


@contextlib.contextmanager
def busy_interpreter() -> Iterator[None]:
    """Have another thread run Python meanwhile."""
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            pass

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def spread(values: list[float]) -> dict[str, Any]:
    """Return median, extremes and all of some values."""
    return {
        "median": statistics.median(values),
        "least": min(values),
        "most": max(values),
        "rounds": values,
    }


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return rates of every way, in GB/s, and what the floors predict."""
    layout = make_layout(
        [TensorSpec(name="w", dtype=torch.uint8, shape=(int(args.block_mb * 1e6) // 256 * 256,))]
    )
    bench = Bench(folder, layout, -(-int(args.gb * GB) // layout.num_bytes))
    ways: list[tuple[str, Callable[[], Taken]]] = [
        ("plain", lambda: bench.plainly(direct=False)),
        ("plain_direct", lambda: bench.plainly(direct=True)),
        *((name, lambda way=RING_WAYS[name]: bench.through_ring(way)) for name in args.ring),
    ]
    rates, cpu, hashing = defaultdict(list), defaultdict(list), []
    for index in range(args.rounds):
        hashing.append(bench.hashing())
        # What went before may have left something in a cache that cannot be dropped: nobody always goes last.
        shift = index * 5 % len(ways)
        for name, way in ways[shift:] + ways[:shift]:
            taken = way()
            rates[name].append(taken.gb_per_second)
            cpu[name].append(taken.cpu_seconds)
    bench.drop = False
    cached = defaultdict(list)
    bench.plainly(direct=False)
    for _ in range(args.rounds):
        cached["plain"].append(bench.plainly(direct=False).gb_per_second)
        cached["ring"].append(bench.through_ring(RING_WAYS["ring_through_page_cache"]).gb_per_second)
    bench.drop = True
    planned = measure_disk_rate(folder)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    disk, hashed = max(medians["plain"], medians["plain_direct"]), statistics.median(hashing)
    # Readers hash side by side, while the others read; only the last block's hash has nothing to hide behind.
    cores = len(os.sched_getaffinity(0))
    first_seconds = bench.total / min(disk, cores * hashed) + layout.num_bytes / hashed
    return {
        "store_bytes": bench.total,
        "block_bytes": layout.num_bytes,
        "blocks": bench.num_blocks,
        "ring_buffers": RING_BUFFERS,
        "readers": READERS,
        "part_bytes": PART_BYTES,
        "floors_gb_per_second": {"disk": disk, "hash": hashed},
        "predicted_gb_per_second": {"ring": disk, "ring_first_pass": bench.total / first_seconds},
        "ring_over_disk": medians["ring"] / disk,
        "gb_per_second": {name: spread(values) for name, values in rates.items()},
        "cpu_seconds": {name: statistics.median(values) for name, values in cpu.items()},
        "from_page_cache_gb_per_second": {name: spread(values) for name, values in cached.items()},
        "planner_gb_per_second": None if planned is None else planned / GB,
        "method": METHOD,
    }


def main() -> None:
    """Measure and write the receipt; the store is removed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--name", default="disk-rate", help="of the receipt")
    parser.add_argument("--gb", type=float, default=2.5)
    parser.add_argument("--block-mb", type=float, default=252, help="bytes of a block: 252 MB is a 32B block")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--ring", nargs="+", choices=RING_WAYS, default=list(RING_WAYS), help="ways: `ring` is one"
    )
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measured = measure(Path(folder), args)
    write_receipt(args.output / f"{args.name}.json", CPU, measured)
    for name, found in measured["gb_per_second"].items():
        cpu = measured["cpu_seconds"][name]
        spread_of = f"{found['median']:.2f} GB/s ({found['least']:.2f} to {found['most']:.2f})"
        print(f"{name}: {spread_of}, {cpu:.2f} s of processors")
    print(
        {key: measured[key] for key in ("floors_gb_per_second", "predicted_gb_per_second", "ring_over_disk")}
    )


if __name__ == "__main__":
    main()
