"""Which blocks stay on the device, and where the others live."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from poros.blocks.layout import make_layout
from poros.blocks.placement import PlacedStore, spread_evenly
from poros.interfaces import TensorSpec


@given(st.integers(0, 90), st.integers(1, 80))
def test_as_many_blocks_stay_as_were_asked_for(count: int, num_blocks: int) -> None:
    resident = spread_evenly(count, num_blocks)
    assert len(resident) == min(count, num_blocks)
    assert resident <= set(range(num_blocks))


@given(st.integers(1, 80), st.integers(1, 80))
def test_gaps_between_resident_blocks_differ_by_at_most_one(count: int, num_blocks: int) -> None:
    resident = sorted(spread_evenly(count, num_blocks))
    gaps = {after - before for before, after in itertools.pairwise(resident)}
    assert max(gaps, default=0) - min(gaps, default=0) <= 1


@pytest.mark.parametrize("resident", [frozenset(), frozenset({0}), frozenset({1, 2}), frozenset({0, 1, 2})])
def test_every_block_has_a_home_of_its_own(resident: frozenset[int]) -> None:
    layouts = [make_layout([TensorSpec(name="w", dtype=torch.uint8, shape=(n,))]) for n in (300, 700, 20)]
    store = PlacedStore(layouts, resident, torch.device("cpu"), pin=False)
    for index in range(3):
        store.block(index).fill_(index + 1)
    assert [int(store.block(index).unique()) for index in range(3)] == [1, 2, 3]
    assert [store.block(index).numel() for index in range(3)] == [layout.num_bytes for layout in layouts]
