"""Blocks on the disk: checked when they first come, read ahead through a ring, every fault a sentence."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from poros.blocks import block_file
from poros.blocks.block_file import BlockFile
from poros.blocks.disk_ring import RING_BUFFERS, DiskRing
from poros.blocks.layout import make_layout
from poros.blocks.placement import PlacedStore, place_blocks
from poros.blocks.slots import HostSlots
from poros.blocks.store import HostStore
from poros.blocks.store_cache import StoreCache
from poros.errors import CheckpointError
from poros.interfaces import TensorSpec
from poros.settings import Plan

NUM_BLOCKS = 9
CPU = torch.device("cpu")
LAYOUTS = [
    make_layout([TensorSpec(name="w", dtype=torch.uint8, shape=(3000 + 700 * index,))])
    for index in range(NUM_BLOCKS)
]
LONG_ENOUGH = 30.0
SECTOR_BYTES = block_file.SECTOR_BYTES


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one sector: blocks here have one to three."""
    monkeypatch.setattr(block_file, "PART_BYTES", SECTOR_BYTES)


def content(index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, 256, (LAYOUTS[index].num_bytes,), generator=generator, dtype=torch.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cached store of nine unequal blocks."""
    store = HostStore(LAYOUTS, pin=False)
    for index in range(NUM_BLOCKS):
        store.block(index).copy_(content(index))
    StoreCache(tmp_path).save("key", store, NUM_BLOCKS)
    return tmp_path / "key"


def path_of(folder: Path, index: int) -> Path:
    return folder / f"block-{index:05d}.safetensors"


@pytest.fixture
def store(folder: Path) -> Iterator[PlacedStore]:
    """The store with every block but the first on the disk."""
    placed = PlacedStore(LAYOUTS, frozenset(), CPU, pin=False, on_disk=frozenset(range(1, NUM_BLOCKS)))
    assert StoreCache(folder.parent).load("key", placed, NUM_BLOCKS)
    yield placed
    placed.close()


@pytest.fixture
def ring(store: PlacedStore) -> Iterator[DiskRing]:
    """The ring over it."""
    made = DiskRing(store.files, pin=False)
    yield made
    made.close()


def bytes_of(ring: DiskRing, block: int) -> torch.Tensor:
    """Take a block, copy its bytes and give its buffer back."""
    read = ring.take(block)
    assert ring.wait(read, LONG_ENOUGH)
    try:
        return ring.bytes(read).clone()
    finally:
        ring.give_back(read)


# ---- where blocks go


def test_blocks_on_the_disk_lie_evenly_among_those_that_move() -> None:
    resident, on_disk = place_blocks(Plan(resident_blocks=2, disk_blocks=3), 8)
    assert (sorted(resident), sorted(on_disk)) == ([2, 6], [1, 4, 7])
    assert place_blocks(Plan(disk_blocks=100), 4) == (frozenset(), frozenset(range(4)))


def test_host_memory_holds_no_block_that_is_on_the_disk(store: PlacedStore) -> None:
    assert store._host.layouts == LAYOUTS[:1]
    for index in range(NUM_BLOCKS):
        assert torch.equal(store.block(index), content(index))


# ---- one file


def test_bytes_are_hashed_at_the_first_read_only(store: PlacedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    sha256 = block_file.hashlib.sha256

    def counted(*given: object) -> object:
        hashed.append(1)
        return sha256(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(block_file.hashlib, "sha256", counted)
    for _ in range(3):
        assert torch.equal(store.block(4), content(4))
    assert len(hashed) == 1


def flip_a_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    os.utime(path)


def write_again(path: Path) -> None:
    """Write one byte as it is."""
    with path.open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(byte)
    os.utime(path)


def test_a_flipped_bit_is_named_with_both_hashes(folder: Path, store: PlacedStore) -> None:
    flip_a_bit(path_of(folder, 3))
    with pytest.raises(
        CheckpointError,
        match=r"cached block changed: expected SHA-256 [0-9a-f]{64}, got [0-9a-f]{64} \(.*block-00003.*Remove",
    ):
        store.block(3)


def test_a_bit_that_flips_after_the_first_read_is_caught(folder: Path, store: PlacedStore) -> None:
    store.block(3)
    flip_a_bit(path_of(folder, 3))
    with pytest.raises(CheckpointError, match="cached block changed"):
        store.block(3)


def test_a_file_that_is_written_to_while_it_is_read_is_hashed_afterwards(
    folder: Path, store: PlacedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.block(3)
    preadv, first = os.preadv, iter([True])

    def written_meanwhile(*given: object) -> int:
        if next(first, False):
            flip_a_bit(path_of(folder, 3))
        return preadv(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", written_meanwhile)
    with pytest.raises(CheckpointError, match="cached block changed"):
        store.block(3)


def test_a_file_that_is_cut_says_how_much_is_left(folder: Path, store: PlacedStore) -> None:
    os.truncate(path_of(folder, 3), 1000)
    with pytest.raises(CheckpointError, match=r"ended early: expected \d+ bytes, got \d+: .*block-00003"):
        store.block(3)


def test_a_folder_that_is_removed_keeps_its_bytes_for_the_run(folder: Path, store: PlacedStore) -> None:
    for path in folder.iterdir():
        path.unlink()
    assert torch.equal(store.block(3), content(3))


def test_a_disk_that_fails_is_named(store: PlacedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(
        CheckpointError, match=r"Cannot read a cached block: .*Input/output error.*block-00002"
    ):
        store.block(2)


def test_reads_that_come_in_pieces_are_put_together(
    store: PlacedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:1000]], at))
    assert torch.equal(store.block(5), content(5))


def test_a_read_that_ends_within_a_sector_goes_on_through_the_page_cache(
    ring: DiskRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: min(1000, preadv(fd, views, at)))
    ring.announce([5])
    assert torch.equal(bytes_of(ring, 5), content(5))


@pytest.mark.parametrize("refused", ["open", "preadv"])
def test_where_the_page_cache_cannot_be_passed_blocks_come_through_it(
    refused: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = getattr(os, refused)

    def refuse(what: object, *given: object) -> object:
        if refused == "preadv" or str(what).startswith("/proc/self/fd/"):
            raise OSError(errno.EINVAL, "Invalid argument")
        return call(what, *given)

    monkeypatch.setattr(os, refused, refuse)
    file = BlockFile(path_of(folder, 8), LAYOUTS[8].num_bytes, "")
    monkeypatch.undo()
    assert not fcntl.fcntl(file._direct, fcntl.F_GETFL) & os.O_DIRECT
    buffer = torch.zeros(
        file.buffer_bytes, dtype=torch.uint8
    )  # from anywhere on: nothing asks for whole sectors
    file.read_part(0, buffer)
    assert torch.equal(file.block_in(buffer), content(8))
    file.close()


def test_a_truncated_file_is_refused_when_it_is_opened(folder: Path) -> None:
    os.truncate(path_of(folder, 3), 1000)
    with pytest.raises(CheckpointError, match="Truncated"):
        BlockFile(path_of(folder, 3), LAYOUTS[3].num_bytes, "")


# ---- the ring


def test_announced_blocks_come_in_order_through_few_buffers(ring: DiskRing) -> None:
    order = [1, 2, 3, 4, 5, 6, 7, 8, 8, 7, 6, 5, 4, 3, 2, 1]
    ring.announce(order)
    for block in order:
        assert torch.equal(bytes_of(ring, block), content(block))


def test_as_many_blocks_as_there_are_buffers_are_read_ahead(
    ring: DiskRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring.announce(range(1, NUM_BLOCKS))
    ahead = list(ring._ahead)
    assert all(ring.wait(read, LONG_ENOUGH) for read in ahead[:RING_BUFFERS])
    assert not ring.wait(ahead[RING_BUFFERS], 0.05)
    assert torch.equal(bytes_of(ring, 1), content(1))
    assert ring.wait(ahead[RING_BUFFERS], LONG_ENOUGH)


def test_another_block_than_the_announced_one_is_read_at_once(ring: DiskRing) -> None:
    ring.announce([1, 2, 3, 4, 5, 6])
    for block in (7, 1, 2, 8):
        assert torch.equal(bytes_of(ring, block), content(block))


def test_a_pass_that_ends_early_leaves_every_buffer_free(ring: DiskRing) -> None:
    for _ in range(5):
        ring.announce(range(1, NUM_BLOCKS))
        taken = ring.take(1)
        ring.announce(())
        ring.give_back(taken)
    assert torch.equal(bytes_of(ring, 6), content(6))
    for thread_done in range(100):
        if len(ring._free) == RING_BUFFERS:
            break
        threading.Event().wait(0.01 * (thread_done + 1))
    assert sorted(ring._free) == list(range(RING_BUFFERS))


def test_reads_that_fail_take_no_buffer_from_the_others(folder: Path, ring: DiskRing) -> None:
    bad = (1, 2, 3, 4, 5)
    for block in bad:
        flip_a_bit(path_of(folder, block))
    ring.announce(range(1, NUM_BLOCKS))
    reads = [ring.take(block) for block in range(1, NUM_BLOCKS)]
    for read in reversed(reads):  # nobody gives a buffer back meanwhile
        assert ring.wait(read, LONG_ENOUGH)
    for read in reads:
        if read.block in bad:
            with pytest.raises(CheckpointError, match="cached block changed"):
                ring.bytes(read)
        else:
            assert torch.equal(ring.bytes(read), content(read.block))
        ring.give_back(read)


def test_readers_share_the_parts_of_one_block(ring: DiskRing, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3)
    read_part = BlockFile.read_part

    def read_together(self: BlockFile, part: int, buffer: torch.Tensor) -> block_file.Version:
        together.wait(LONG_ENOUGH)
        return read_part(self, part, buffer)

    monkeypatch.setattr(BlockFile, "read_part", read_together)
    ring.announce([8])
    assert ring._files[8].num_parts == 3
    assert torch.equal(bytes_of(ring, 8), content(8))


def test_a_part_that_fails_fails_its_block_only(store: PlacedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    read_part = BlockFile.read_part

    def fail_once(self: BlockFile, part: int, buffer: torch.Tensor) -> block_file.Version:
        if self is store.files[7] and part == 1:
            raise CheckpointError("the middle of 7")
        return read_part(self, part, buffer)

    monkeypatch.setattr(BlockFile, "read_part", fail_once)
    ring = DiskRing(store.files, pin=False)
    ring.announce([6, 7, 8])
    assert torch.equal(bytes_of(ring, 6), content(6))
    with pytest.raises(CheckpointError, match="the middle of 7"):
        bytes_of(ring, 7)
    assert torch.equal(bytes_of(ring, 8), content(8))
    assert sorted(ring._free) == list(range(RING_BUFFERS))
    ring.close()


def test_a_file_that_changes_between_two_parts_is_hashed_afterwards(
    folder: Path, store: PlacedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = DiskRing(store.files, pin=False)
    ring.announce([8])
    assert torch.equal(bytes_of(ring, 8), content(8))
    read_part, first = BlockFile.read_part, iter([True])

    def written_meanwhile(self: BlockFile, part: int, buffer: torch.Tensor) -> block_file.Version:
        version = read_part(self, part, buffer)
        if next(first, False):
            write_again(
                path_of(folder, 8)
            )  # other readers are at other parts: the bytes are right at every moment
        return version

    monkeypatch.setattr(BlockFile, "read_part", written_meanwhile)
    hashed: list[int] = []
    check_hash = BlockFile._check_hash
    monkeypatch.setattr(BlockFile, "_check_hash", lambda self, got: (hashed.append(1), check_hash(self, got)))
    for times in (1, 2):  # versions differed: nothing is known of what the next read finds
        ring.announce([8])
        assert torch.equal(bytes_of(ring, 8), content(8))
        assert len(hashed) == times
    ring.close()


def test_close_ends_the_threads(store: PlacedStore) -> None:
    ring = DiskRing(store.files, pin=False)
    ring.announce(range(1, NUM_BLOCKS))
    ring.close()
    assert not any(thread.is_alive() for thread in ring._threads)


# ---- slots


@pytest.fixture
def make_slots(store: PlacedStore) -> Iterator[Callable[..., HostSlots]]:
    """Return slots over the store, closed at the end."""
    made: list[HostSlots] = []

    def make(num_slots: int, *, lazy: bool) -> HostSlots:
        made.append(HostSlots(store, num_slots, CPU, lazy=lazy))
        return made[-1]

    yield make
    for slots in made:
        slots.close()


def held(slots: HostSlots, slot: int, block: int) -> bool:
    return torch.equal(slots.buffers[slot][: LAYOUTS[block].num_bytes], content(block))


@pytest.mark.parametrize("lazy", [False, True])
def test_a_slot_holds_its_block_once_it_is_acquired(lazy: bool, make_slots: Callable[..., HostSlots]) -> None:
    slots = make_slots(3, lazy=lazy)
    order = list(range(NUM_BLOCKS))
    slots.announce(order)
    for block in order:
        slots.prefetch(block, block % 3)
        slots.acquire(block % 3)
        assert held(slots, block % 3, block)
        slots.release(block % 3)
    assert slots.take_statistics().disk_bytes == sum(layout.num_bytes for layout in LAYOUTS[1:])


@pytest.mark.parametrize("lazy", [False, True])
def test_more_slots_than_buffers_may_wait_in_any_order(
    lazy: bool, make_slots: Callable[..., HostSlots]
) -> None:
    slots = make_slots(8, lazy=lazy)
    for slot in range(8):
        slots.prefetch(slot + 1, slot)
    for slot in reversed(range(8)):
        slots.acquire(slot)
        assert held(slots, slot, slot + 1)


def test_a_block_that_is_no_longer_wanted_makes_room(make_slots: Callable[..., HostSlots]) -> None:
    slots = make_slots(2, lazy=True)
    for block in range(1, NUM_BLOCKS):
        slots.prefetch(block, 0)
    slots.acquire(0)
    assert held(slots, 0, NUM_BLOCKS - 1)


def test_a_fault_shows_at_the_visit_that_needs_the_block(
    folder: Path, make_slots: Callable[..., HostSlots]
) -> None:
    slots = make_slots(3, lazy=False)
    flip_a_bit(path_of(folder, 2))
    slots.announce([1, 2, 3])
    for slot, block in enumerate((1, 2, 3)):
        slots.prefetch(block, slot)
    slots.acquire(0)
    assert held(slots, 0, 1)
    with pytest.raises(CheckpointError, match="cached block changed"):
        slots.acquire(1)
    slots.drain()
    assert slots.contents[1] is None
    slots.prefetch(4, 1)
    slots.acquire(1)
    assert held(slots, 1, 4)


def test_a_buffer_that_is_refilled_too_early_is_caught(
    make_slots: Callable[..., HostSlots], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: buffers go to the next read before their block is copied, and that read comes first."""
    slots = make_slots(2, lazy=True)
    ring = slots.ring
    assert ring is not None
    ring._free = [0]
    ring.announce([1, 2])
    first, second = ring._ahead
    assert ring.wait(first, LONG_ENOUGH)
    slots.prefetch(1, 0)
    with ring._changed:
        ring._free.append(0)
        ring._changed.notify_all()
    assert ring.wait(second, LONG_ENOUGH)
    slots.acquire(0)
    assert not held(slots, 0, 1)
    ring._free.clear()
