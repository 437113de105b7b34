"""The flat adapter bank: rows, padding, copies to and from the static region."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from poros.bank import ALIGNMENT_ELEMENTS, GROUPS, AdapterBank, AdapterSignature, StaticRegion, make_signature
from poros.optimizer import BankOptimizer
from poros.settings import OptimizerSettings

CPU = torch.device("cpu")
SMALL = make_signature([("a", (2, 5), (7, 2)), ("b", (3, 11), (1, 3))])
LARGE = make_signature([("a", (8, 40), (50, 8))])
NONE = make_signature([])
SIGNATURES = (SMALL, NONE, LARGE, SMALL)


@pytest.fixture
def bank() -> AdapterBank:
    made = AdapterBank(SIGNATURES, CPU)
    generator = torch.Generator().manual_seed(1)
    for buffers in (made.weights, made.gradients):
        for _, _, view in made.tensors(buffers):
            view.copy_(torch.randn(view.shape, generator=generator))
    return made


def padding(bank: AdapterBank, buffers: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the elements of ``buffers`` that belong to no tensor."""
    used = {group: torch.zeros_like(buffer, dtype=torch.bool) for group, buffer in buffers.items()}
    for _, _, view in bank.tensors(used):
        view.fill_(True)
    return torch.cat([buffers[group][~used[group]] for group in GROUPS])


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 9), st.integers(1, 70), st.integers(1, 70)), max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_tensors_start_at_multiples_of_256_elements_and_never_overlap(
    blocks: list[list[tuple[int, int, int]]],
) -> None:
    made = AdapterBank(
        [
            make_signature([(f"m{i}", (r, d), (o, r)) for i, (r, d, o) in enumerate(block)])
            for block in blocks
        ],
        CPU,
    )
    counts = {group: torch.zeros_like(weights) for group, weights in made.weights.items()}
    for _, tensor, view in made.tensors(counts):
        start = view.data_ptr() - counts[tensor.group].data_ptr()
        assert start % (ALIGNMENT_ELEMENTS * 4) == 0
        view.add_(1)
    assert all(count.max() <= 1 for count in counts.values() if count.numel())


def test_a_block_s_row_goes_into_the_region_and_gradients_come_back(bank: AdapterBank) -> None:
    region = StaticRegion(SIGNATURES, CPU)
    for block, signature in enumerate(SIGNATURES):
        bank.load_weights(block, region)
        bank.load_gradients(block, region)
        views = {(b, t.path, t.group): v for b, t, v in bank.tensors(bank.weights)}
        for tensor in signature.tensors:
            assert torch.equal(region.weight(tensor), views[block, tensor.path, tensor.group])
            region.gradient(tensor).add_(block + 1)
    before = {g: t.clone() for g, t in bank.gradients.items()}
    bank.store_gradients(3, region)
    for block, tensor, view in bank.tensors(bank.gradients):
        old = next(v for b, t, v in bank.tensors(before) if (b, t) == (block, tensor))
        assert torch.equal(view, old + 4 if block == 3 else old)


def test_the_region_is_as_large_as_the_largest_row() -> None:
    region = StaticRegion(SIGNATURES, CPU)
    assert {g: w.numel() for g, w in region.weights.items()} == {g: LARGE.row_size(g) for g in GROUPS}


def test_backward_ends_at_the_lowest_block_with_an_adapter() -> None:
    assert AdapterBank([NONE, NONE, SMALL, NONE], CPU).lowest_adapted() == 2


def test_a_block_without_adapter_has_an_empty_row(bank: AdapterBank) -> None:
    assert not bank.has_adapter(1)
    assert NONE.row_size("lora_A") == NONE.row_size("lora_B") == 0


def test_zeroing_gradients_keeps_their_memory(bank: AdapterBank) -> None:
    addresses = [g.data_ptr() for g in bank.gradients.values()]
    bank.zero_gradients()
    assert not any(g.any() for g in bank.gradients.values())
    assert [g.data_ptr() for g in bank.gradients.values()] == addresses


def test_padding_stays_zero_through_adamw_with_weight_decay(bank: AdapterBank) -> None:
    optimizer = BankOptimizer(
        bank, OptimizerSettings(learning_rate=0.1, weight_decay=0.5), num_training_steps=5
    )
    assert padding(bank, bank.weights).numel() > 0
    for _ in range(5):
        optimizer.clip()
        optimizer.step()
    for buffers in (bank.weights, optimizer.moments("exp_avg"), optimizer.moments("exp_avg_sq")):
        assert padding(bank, buffers).eq(0).all()


def test_signatures_are_equal_by_value() -> None:
    again = make_signature([("a", (2, 5), (7, 2)), ("b", (3, 11), (1, 3))])
    assert isinstance(again, AdapterSignature)
    assert again == SMALL
    assert hash(again) == hash(SMALL)
    assert make_signature([("c", (2, 5), (7, 2)), ("b", (3, 11), (1, 3))]) != SMALL


def test_masters_and_gradients_are_float32_in_any_default_dtype() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        made, region = AdapterBank(SIGNATURES, CPU), StaticRegion(SIGNATURES, CPU)
    finally:
        torch.set_default_dtype(torch.float32)
    buffers = [made.weights, made.gradients, region.weights, region.gradients]
    assert {tensor.dtype for held in buffers for tensor in held.values()} == {torch.float32}
