"""Cases 1, 3 and 22: padding, accumulation and the position in the data."""

from __future__ import annotations

import pytest
import torch

from poros_data import DataError, Row, StepPlan, eval_batches, padding_id
from poros_data.packing import pack

PAD = 2


def row(length: int, line: int = 1) -> Row:
    """A row that ends with the padding id, as a chat ends with `<|im_end|>`."""
    ids = [10 + i for i in range(length - 1)] + [PAD]
    return Row(ids, [-100, *ids[1:]], line)


def plan(rows, **settings) -> StepPlan:
    defaults = {
        "micro_batch_size": 1,
        "micro_batches_per_step": 4,
        "length_bucket": 4,
        "pad_id": PAD,
        "seed": 0,
        "num_epochs": 1,
    }
    return StepPlan(rows, **{**defaults, **settings})


def ids_of(steps: StepPlan) -> list[list[tuple[int, ...]]]:
    return [[batch.row_ids for batch in steps.step(index)] for index in range(steps.num_steps)]


ROWS_23 = [row(2 + i % 5, line=i + 1) for i in range(23)]


def test_padding_is_masked_by_position_and_never_by_id():
    (batch,) = eval_batches([row(3), row(5)], micro_batch_size=2, length_bucket=4, pad_id=PAD)
    assert batch.input_ids.tolist() == [
        [10, 11, PAD, PAD, PAD, PAD, PAD, PAD],
        [10, 11, 12, 13, PAD, PAD, PAD, PAD],
    ]
    assert batch.labels.tolist() == [[-100, 11, PAD] + [-100] * 5, [-100, 11, 12, 13, PAD] + [-100] * 3]
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64


@pytest.mark.parametrize(("length", "padded"), [(1, 4), (4, 4), (5, 8)])
def test_lengths_are_rounded_up_to_the_bucket(length, padded):
    (batch,) = eval_batches([row(length)], micro_batch_size=1, length_bucket=4, pad_id=PAD)
    assert batch.input_ids.shape == (1, padded)


def test_an_epoch_keeps_its_last_short_step():
    steps = plan(ROWS_23, num_epochs=2)
    assert (steps.num_steps, steps.steps_per_epoch) == (12, 6)
    assert [len(step) for step in ids_of(steps)] == [4, 4, 4, 4, 4, 3] * 2


def test_each_epoch_visits_every_row_once_and_no_step_mixes_two():
    steps = ids_of(plan(ROWS_23, num_epochs=2))
    for epoch in (steps[:6], steps[6:]):
        assert sorted(row for step in epoch for batch in step for row in batch) == list(range(23))


def test_the_last_micro_batch_keeps_what_is_left():
    steps = plan(ROWS_23, micro_batch_size=2, micro_batches_per_step=4)
    assert [[len(batch) for batch in step] for step in ids_of(steps)] == [[2] * 4, [2] * 4, [2, 2, 2, 1]]


def test_a_step_depends_on_its_index_alone():
    whole = plan(ROWS_23, num_epochs=2)
    expected = ids_of(whole)
    for index in (7, 5, 11, 0, 6):
        resumed = plan(ROWS_23, num_epochs=2)
        for fresh in (resumed.step(index), whole.step(index)):
            assert [batch.row_ids for batch in fresh] == expected[index]
        for a, b in zip(resumed.step(index), whole.step(index), strict=True):
            assert torch.equal(a.input_ids, b.input_ids)
            assert torch.equal(a.labels, b.labels)


def test_the_order_depends_on_seed_and_epoch():
    two = ids_of(plan(ROWS_23, num_epochs=2))
    assert two[:6] != two[6:]
    assert two[:6] == ids_of(plan(ROWS_23))
    assert two[:6] != ids_of(plan(ROWS_23, seed=1))


def test_the_order_is_the_same_everywhere():
    assert ids_of(plan(ROWS_23[:5], micro_batches_per_step=5)) == [[(4,), (1,), (2,), (3,), (0,)]]


def test_without_shuffling_the_file_order_is_kept():
    steps = ids_of(plan(ROWS_23, order="file", num_epochs=2))
    assert [row for step in steps for batch in step for row in batch] == [*range(23), *range(23)]


def test_three_splits_of_a_step_supervise_the_same_tokens():
    rows = [row(length) for length in (3, 201, 6, 61)]
    splits = [(4, 1), (2, 2), (1, 4)]
    found = []
    for size, accumulation in splits:
        steps = plan(rows, micro_batch_size=size, micro_batches_per_step=accumulation)
        assert steps.num_steps == 1
        batches = steps.step(0)
        assert [batch.input_ids.shape[0] for batch in batches] == [size] * accumulation
        tokens = [
            (i, x[x != -100].tolist()) for b in batches for i, x in zip(b.row_ids, b.labels, strict=True)
        ]
        found.append(tokens)
    assert found[0] == found[1] == found[2]
    assert sorted(len(tokens) for _, tokens in found[0]) == [2, 5, 60, 200]


@pytest.mark.parametrize(
    ("length", "num_steps"),
    [
        ({"num_epochs": 2}, 12),
        ({"num_epochs": 2, "max_steps": 5}, 5),
        ({"num_epochs": 1, "max_steps": 50}, 6),
        ({"num_epochs": None, "max_steps": 50}, 50),
    ],
)
def test_the_shorter_of_epochs_and_steps_ends_the_run(length, num_steps):
    assert plan(ROWS_23, **length).num_steps == num_steps


def test_a_longer_run_has_the_same_fingerprint_and_begins_with_the_same_steps():
    short, long = plan(ROWS_23, max_steps=3), plan(ROWS_23, num_epochs=3)
    assert short.fingerprint == long.fingerprint
    assert ids_of(short) == ids_of(long)[:3]


@pytest.mark.parametrize(
    "change",
    [
        {"micro_batch_size": 2},
        {"micro_batches_per_step": 2},
        {"length_bucket": 8},
        {"pad_id": 0},
        {"seed": 1},
        {"order": "file"},
        {"order": "length-sorted"},
        {"weights": [2.0] * 23},
        {"packed_length": 16},
    ],
)
def test_whatever_a_step_reads_is_in_the_fingerprint(change):
    assert plan(ROWS_23).fingerprint != plan(ROWS_23, **change).fingerprint


def test_the_rows_are_in_the_fingerprint():
    relabelled = Row(ROWS_23[0].input_ids, [-100] * len(ROWS_23[0].labels), 1)
    assert plan(ROWS_23).fingerprint != plan([relabelled, *ROWS_23[1:]]).fingerprint


@pytest.mark.parametrize("index", [-1, 6])
def test_a_step_outside_the_run_is_an_index_error(index):
    with pytest.raises(IndexError, match=f"step {index} of 6"):
        plan(ROWS_23).step(index)


@pytest.mark.parametrize(
    ("rows", "settings", "said"),
    [
        ([], {}, "expected at least one row, got none"),
        (ROWS_23, {"num_epochs": None}, "expected `num_epochs` or `max_steps`, got neither of them"),
        (ROWS_23, {"micro_batch_size": 0}, "Bad setting `micro_batch_size`: expected 1 or more, got 0"),
        (ROWS_23, {"max_steps": 0}, "Bad setting `max_steps`: expected 1 or more, got 0"),
    ],
)
def test_an_impossible_plan_is_refused(rows, settings, said):
    with pytest.raises(DataError, match=said):
        plan(rows, **settings)


def test_evaluation_reads_every_row_once_in_order():
    batches = eval_batches(ROWS_23, micro_batch_size=5, length_bucket=4, pad_id=PAD)
    assert [row for batch in batches for row in batch.row_ids] == list(range(23))


def test_the_padding_id_falls_back_to_the_end_token(make_tokenizer):
    assert padding_id(make_tokenizer()) == 0
    assert padding_id(make_tokenizer(pad_token=None)) == PAD
    with pytest.raises(
        DataError, match="expected a tokenizer with a `pad_token` or an `eos_token`, got neither"
    ):
        padding_id(make_tokenizer(pad_token=None, eos_token=None))


def test_a_real_end_token_is_trained_where_it_is_also_the_padding(write, make_tokenizer):
    from poros_data import load_dataset

    tokenizer = make_tokenizer(pad_token="<|im_end|>")
    data = load_dataset(write({"text": "x"}, {"text": "the quick brown fox"}), tokenizer, max_length=64)
    (batch,) = eval_batches(data.rows, micro_batch_size=2, length_bucket=4, pad_id=padding_id(tokenizer))
    for ids, labels, row in zip(batch.input_ids, batch.labels, data.rows, strict=True):
        length = len(row.input_ids)
        assert labels[length - 1] == ids[length - 1] == tokenizer.eos_token_id
        assert (labels[length:] == -100).all()


def test_a_plan_is_what_the_engine_reads():
    from poros.interfaces import MicroBatch, StepSource

    steps = plan(ROWS_23)
    assert isinstance(steps, StepSource)
    assert all(isinstance(batch, MicroBatch) for batch in steps.step(0))


def test_length_sorted_batches_pad_less_and_visit_every_row_once():
    rows = [row(2 + (7 * i) % 61, line=i + 1) for i in range(60)]

    def positions(steps):
        return sum(batch.input_ids.numel() for index in range(steps.num_steps) for batch in steps.step(index))

    settings = {"micro_batch_size": 4, "micro_batches_per_step": 2, "num_epochs": 2}
    shuffled, sorted_ = plan(rows, **settings), plan(rows, order="length-sorted", **settings)
    visited = [i for step in ids_of(sorted_)[: sorted_.steps_per_epoch] for batch in step for i in batch]
    assert sorted(visited) == list(range(60))
    assert positions(sorted_) < 0.75 * positions(shuffled)
    assert ids_of(sorted_) == ids_of(plan(rows, order="length-sorted", **settings))
    assert ids_of(sorted_)[: sorted_.steps_per_epoch] != ids_of(sorted_)[sorted_.steps_per_epoch :]
    assert ids_of(sorted_) != ids_of(plan(rows, order="length-sorted", seed=1, **settings))


def test_a_short_micro_batch_stays_last_when_sorted():
    steps = plan(ROWS_23, micro_batch_size=4, micro_batches_per_step=2, order="length-sorted")
    sizes = [len(batch) for step in ids_of(steps) for batch in step]
    assert sizes == [4, 4, 4, 4, 4, 3]


def test_weights_are_visits_per_epoch_and_fractions_are_drawn_anew():
    weights = [1.0] * 10 + [2.0] * 5 + [0.5] * 8
    steps = plan(ROWS_23, weights=weights, num_epochs=2)
    epochs = [
        [i for step in ids_of(steps)[start : start + steps.steps_per_epoch] for batch in step for i in batch]
        for start in (0, steps.steps_per_epoch)
    ]
    for visited in epochs:
        assert [visited.count(i) for i in range(15)] == [1] * 10 + [2] * 5
        assert len(visited) == len([i for i in visited if i < 15]) + 4
    assert {i for i in epochs[0] if i >= 15} != {i for i in epochs[1] if i >= 15}


def test_weights_that_leave_an_epoch_empty_are_refused():
    with pytest.raises(DataError, match="weights too small for one"):
        plan(ROWS_23[:2], weights=[0.1, 0.1])


def test_packed_rows_stand_behind_each_other_with_positions_of_their_own():
    rows = [row(3), row(4), row(2)]
    (batch,) = plan(rows, packed_length=8, order="file", length_bucket=4, micro_batch_size=2).step(0)
    assert batch.row_ids == (0, 1, 2)
    assert batch.input_ids.tolist() == [[10, 11, PAD, 10, 11, 12, PAD, PAD], [10, PAD] + [PAD] * 6]
    assert batch.labels.tolist() == [[-100, 11, PAD, -100, 11, 12, PAD, -100], [-100, PAD] + [-100] * 6]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 0, 1, 2, 3, 4, 5]]


def test_without_packing_there_are_no_position_ids():
    assert all(batch.position_ids is None for batch in plan(ROWS_23).step(0))


def test_packing_visits_every_row_once_per_epoch_in_fewer_steps():
    steps = plan(ROWS_23, packed_length=16, num_epochs=3)
    assert steps.num_steps < plan(ROWS_23, num_epochs=3).num_steps
    visited = [i for step in ids_of(steps) for batch in step for i in batch]
    assert [sorted(visited[start : start + 23]) for start in (0, 23, 46)] == [[*range(23)]] * 3
    for index in range(steps.num_steps):
        for batch in steps.step(index):
            assert batch.input_ids.shape[1] <= 16


def test_a_step_of_a_packed_run_does_not_depend_on_which_were_asked_for_before():
    asked_in_order, asked_backwards = (plan(ROWS_23, packed_length=16, num_epochs=3) for _ in range(2))
    forward = ids_of(asked_in_order)
    backward = [
        [batch.row_ids for batch in asked_backwards.step(index)]
        for index in reversed(range(asked_backwards.num_steps))
    ]
    assert forward == backward[::-1]
    assert ids_of(plan(ROWS_23, packed_length=16, num_epochs=None, max_steps=4)) == forward[:4]


def test_packs_are_filled_well():
    lengths = [3 + (7 * i) % 29 for i in range(200)]
    packs = pack(lengths, 64)
    assert sorted(i for members in packs for i in members) == [*range(200)]
    assert all(sum(lengths[i] for i in members) <= 64 for members in packs)
    assert len(packs) <= 1.05 * sum(lengths) / 64 + 1


def test_a_row_that_is_longer_than_a_pack_has_one_of_its_own():
    assert pack([9, 3, 4], 8) == [[0], [1, 2]]
