"""Slots on the CPU: what is copied when, and what a pass that ends early leaves."""

from __future__ import annotations

import pytest
import torch

from poros.blocks.layout import make_layout
from poros.blocks.slots import HostSlots
from poros.blocks.store import HostStore
from poros.interfaces import TensorSpec

CPU = torch.device("cpu")
SIZES = (300, 700, 20)


@pytest.fixture
def store() -> HostStore:
    layouts = [make_layout([TensorSpec(name="w", dtype=torch.uint8, shape=(n,))]) for n in SIZES]
    made = HostStore(layouts, pin=False)
    for index in range(len(SIZES)):
        made.block(index).fill_(index + 1)
    return made


def test_a_slot_is_as_long_as_the_largest_block(store: HostStore) -> None:
    slots = HostSlots(store, 2, CPU)
    assert [buffer.numel() for buffer in slots.buffers] == [768, 768]


@pytest.mark.parametrize("lazy", [False, True])
def test_an_acquired_slot_holds_the_block_that_was_prefetched_last(store: HostStore, lazy: bool) -> None:
    slots = HostSlots(store, 2, CPU, lazy=lazy)
    slots.prefetch(0, 1)
    slots.prefetch(1, 1)
    slots.acquire(1)
    assert slots.contents == [None, 1]
    assert torch.equal(slots.buffers[1], store.block(1))


def test_a_lazy_slot_is_not_filled_before_it_is_acquired(store: HostStore) -> None:
    slots = HostSlots(store, 2, CPU, lazy=True)
    slots.prefetch(0, 0)
    assert not slots.buffers[0].any()


def test_draining_completes_pending_copies(store: HostStore) -> None:
    slots = HostSlots(store, 2, CPU, lazy=True)
    slots.prefetch(2, 0)
    slots.drain()
    assert torch.equal(slots.buffers[0][:256], store.block(2))


def test_statistics_count_copied_bytes_once(store: HostStore) -> None:
    slots = HostSlots(store, 2, CPU)
    slots.prefetch(0, 0)
    slots.prefetch(2, 1)
    assert slots.take_statistics().h2d_bytes == 512 + 256
    assert slots.take_statistics().h2d_bytes == 0
