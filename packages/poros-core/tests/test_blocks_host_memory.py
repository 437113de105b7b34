"""Exact-size host memory: what is page-locked, what it costs, what happens when the system refuses.

CUDA's registration is replaced, so that its limits can be played on any machine; `test_parity.py` and the H200
receipts run the real one.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable

import pytest
import torch

from poros.blocks import cudart
from poros.blocks.host_memory import HostArena
from poros.blocks.layout import make_layout
from poros.blocks.slots import _needs_staging
from poros.blocks.store import HostStore
from poros.interfaces import TensorSpec

MAX_PINNED_PER_PAYLOAD = 1.1  # case 8: torch's own pinned allocator takes up to 2
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation

# Blocks as real models have them: an NF4 payload of 32.4 MiB, which torch would round up to 64 MiB.
LARGE_BLOCK_BYTES = 18944 * 3584 // 2 + 1


class Registrations:
    """Page locks that were taken, with a limit on their number."""

    def __init__(self) -> None:
        self.limit = 10**6
        self.held: dict[int, int] = {}

    def register(self, address: int, num_bytes: int) -> int:
        if len(self.held) == self.limit:
            return OUT_OF_MEMORY
        assert address % mmap.PAGESIZE == 0
        self.held[address] = num_bytes
        return 0

    def unregister(self, address: int) -> None:
        del self.held[address]


@pytest.fixture
def registrations(monkeypatch: pytest.MonkeyPatch) -> Registrations:
    made = Registrations()
    monkeypatch.setattr(cudart, "register_host_memory", made.register)
    monkeypatch.setattr(cudart, "unregister_host_memory", made.unregister)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return made


def test_pinned_bytes_exceed_the_payload_by_at_most_a_tenth(registrations: Registrations) -> None:
    arena = HostArena([LARGE_BLOCK_BYTES] * 3, pin=True)
    assert sum(registrations.held.values()) == arena.pinned_bytes == arena.total_bytes
    assert arena.pinned_bytes / (3 * LARGE_BLOCK_BYTES) <= MAX_PINNED_PER_PAYLOAD


def test_a_refused_page_lock_warns_once_by_name_and_keeps_what_it_has(registrations: Registrations) -> None:
    registrations.limit = 2
    with pytest.warns(
        RuntimeWarning, match=r"Page-locking host memory stopped .* not on GPU memory"
    ) as caught:
        arena = HostArena([5000] * 4, pin=True)
    assert len(caught) == 1
    assert "cudaHostRegister returned 2" in str(caught[0].message)
    assert arena.pinned == [True, True, False, False]
    assert arena.pinned_bytes == 2 * 8192


def test_a_store_that_is_pinned_in_part_needs_staging(registrations: Registrations) -> None:
    layout = make_layout([TensorSpec(name="w", dtype=torch.uint8, shape=(5000,))])
    assert not _needs_staging(HostStore([layout] * 3, pin=True))
    registrations.limit = 1
    with pytest.warns(RuntimeWarning, match="Page-locking"):
        assert _needs_staging(HostStore([layout] * 3, pin=True))


def test_without_pinning_nothing_is_registered(registrations: Registrations) -> None:
    arena = HostArena([5000] * 4, pin=False)
    assert not registrations.held
    assert not any(arena.pinned)


def test_closing_unlocks_every_region_once(registrations: Registrations) -> None:
    arena = HostArena([5000] * 3, pin=True)
    arena.close()
    arena.close()
    assert not registrations.held
    assert not any(arena.pinned)


def test_an_arena_that_is_dropped_without_closing_leaves_no_lock_behind(registrations: Registrations) -> None:
    HostArena([5000] * 3, pin=True)
    assert not registrations.held


def test_regions_have_their_exact_sizes_and_do_not_overlap() -> None:
    sizes = [1, 4096, 4097, 0, 10]
    arena = HostArena(sizes, pin=False)
    for index in range(len(sizes)):
        arena.region(index).fill_(index + 1)
    for index, size in enumerate(sizes):
        assert arena.region(index).numel() == size
        assert arena.region(index).eq(index + 1).all()


def test_an_arena_without_regions_is_empty() -> None:
    assert HostArena([], pin=False).total_bytes == 0


def test_a_view_outlives_its_arena() -> None:
    region = HostArena([10], pin=False).region(0)
    region.fill_(3)
    assert region.eq(3).all()


@pytest.mark.parametrize("name", ["MADV_DONTFORK", "MAP_ANONYMOUS"])
def test_systems_without_a_linux_flag_still_get_their_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(mmap, name)
    region = HostArena([5000], pin=False).region(0)
    region.fill_(9)
    assert region.eq(9).all()


class FailingRuntime:
    """The part of torch's cudart that registers, failing as it does for memory that is registered already."""

    @staticmethod
    def cudaHostRegister(address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        return 712

    @staticmethod
    def cudaHostUnregister(address: int) -> int:  # noqa: N802
        return 713


@pytest.mark.parametrize(
    ("call", "code"),
    [(lambda: cudart.register_host_memory(0, 4096), 712), (lambda: cudart.unregister_host_memory(0), None)],
)
def test_a_failed_page_lock_is_cleared_before_the_next_launch(
    call: Callable[[], int | None], code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared = []
    monkeypatch.setattr(torch.cuda, "cudart", FailingRuntime)
    monkeypatch.setattr(cudart, "clear_last_error", lambda: cleared.append(True))
    with warnings.catch_warnings():
        assert call() == code
    assert cleared == [True]
