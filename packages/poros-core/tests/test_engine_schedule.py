"""The schedule of a pass, as properties over every shape of model, slots, residency, order and starting contents."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poros.engine.schedule import Loss, Prefetch, Release, Schedule, ScheduleRequest, Visit, make_schedule
from poros.settings import ACCUMULATION_ORDERS

BLOCK_MAJOR, MICRO_BATCH_MAJOR = ACCUMULATION_ORDERS
MAX_BLOCKS = 9


@st.composite
def requests(draw: st.DrawFn) -> ScheduleRequest:
    num_blocks = draw(st.integers(1, MAX_BLOCKS))
    blocks = st.integers(0, num_blocks - 1)
    held = draw(st.lists(blocks, unique=True, max_size=num_blocks))
    num_slots = draw(st.integers(2, num_blocks + 2))
    resident = draw(st.frozensets(blocks))
    contents: list[int | None] = [block for block in held if block not in resident][:num_slots]
    contents += [None] * (num_slots - len(contents))
    return ScheduleRequest(
        num_blocks=num_blocks,
        resident=resident,
        slots=tuple(draw(st.permutations(contents))),
        num_micro_batches=draw(st.integers(1, 4)),
        order=draw(st.sampled_from(ACCUMULATION_ORDERS)),
        lowest_backward=draw(st.none() | blocks),
        num_head_chunks=draw(st.integers(0, 3)),
    )


def request(**changes: object) -> ScheduleRequest:
    usual: dict[str, object] = {
        "num_blocks": 6,
        "resident": frozenset(),
        "slots": (None, None),
        "num_micro_batches": 3,
        "order": BLOCK_MAJOR,
        "lowest_backward": 0,
    }
    return ScheduleRequest(**{**usual, **changes})  # type: ignore[arg-type]


def visits(schedule: Schedule) -> list[Visit]:
    return [op for op in schedule.ops if isinstance(op, Visit)]


@given(requests())
def test_every_visit_finds_its_block_in_its_slot(asked: ScheduleRequest) -> None:
    schedule = make_schedule(asked)
    slots = list(asked.slots)
    for op in schedule.ops:
        if isinstance(op, Prefetch):
            slots[op.slot] = op.block
        elif isinstance(op, Visit) and op.slot is not None:
            assert slots[op.slot] == op.block
    assert tuple(slots) == schedule.slots


@given(requests())
def test_a_resident_block_is_visited_in_place_and_never_copied(asked: ScheduleRequest) -> None:
    schedule = make_schedule(asked)
    assert all((visit.slot is None) == (visit.block in asked.resident) for visit in visits(schedule))
    assert not any(isinstance(op, Prefetch) and op.block in asked.resident for op in schedule.ops)


@given(requests())
def test_a_filled_slot_is_not_refilled_before_it_was_visited(asked: ScheduleRequest) -> None:
    unread: set[int] = set()
    for op in make_schedule(asked).ops:
        if isinstance(op, Prefetch):
            assert op.slot not in unread
            unread.add(op.slot)
        elif isinstance(op, Visit) and op.slot is not None:
            unread.discard(op.slot)
    assert not unread, "a block was copied and never read"


@given(requests())
def test_every_streamed_visit_is_followed_by_the_release_of_its_slot(asked: ScheduleRequest) -> None:
    ops = make_schedule(asked).ops
    for op, after in zip(ops, [*ops[1:], None], strict=True):
        assert isinstance(after, Release) == (isinstance(op, Visit) and op.slot is not None)
        if isinstance(op, Visit) and op.slot is not None:
            assert after == Release(op.slot)


@given(requests())
def test_no_copy_goes_to_the_slot_that_the_next_visit_reads_while_that_block_waits_in_it(
    asked: ScheduleRequest,
) -> None:
    """A prefetch stands before the visit that hides it, so it must never target that visit's slot."""
    ops = make_schedule(asked).ops
    for index, op in enumerate(ops):
        if isinstance(op, Visit) and op.slot is not None:
            since = index
            while since and isinstance(ops[since - 1], Prefetch):
                since -= 1
            fills = [p for p in ops[since:index] if isinstance(p, Prefetch) and p.slot == op.slot]
            assert [p.block for p in fills] in ([], [op.block])


@given(requests())
def test_every_copy_but_the_first_has_a_whole_visit_to_hide_behind(asked: ScheduleRequest) -> None:
    num_visits = 0
    issued_before: dict[int, int] = {}
    for op in make_schedule(asked).ops:
        if isinstance(op, Prefetch):
            issued_before[op.block] = num_visits
        elif isinstance(op, Visit) and op.slot is not None:
            assert num_visits == 0 or issued_before.pop(op.block, -1) < num_visits
            num_visits += 1


@given(requests())
def test_forward_is_ascending_and_backward_descends_to_the_lowest_adapted_block(
    asked: ScheduleRequest,
) -> None:
    schedule = make_schedule(asked)
    everyone = tuple(range(asked.num_micro_batches))
    groups = [everyone] if asked.order == BLOCK_MAJOR else [(j,) for j in everyone]
    expected: list[tuple[str, int, tuple[int, ...]]] = []
    for group in groups:
        expected += [("forward", block, group) for block in range(asked.num_blocks)]
        if asked.lowest_backward is not None:
            lowest = asked.lowest_backward
            expected += [("backward", block, group) for block in range(asked.num_blocks - 1, lowest - 1, -1)]
    found = [v for v in visits(schedule) if v.direction != "head"]
    assert [(v.direction, v.block, v.micro_batches) for v in found] == expected
    losses = [op.micro_batches for op in schedule.ops if isinstance(op, Loss)]
    assert losses == groups


@given(requests())
def test_the_loss_stands_between_the_last_forward_and_the_first_backward_of_its_micro_batches(
    asked: ScheduleRequest,
) -> None:
    last = asked.num_blocks - 1
    done: set[int] = set()
    lost: set[int] = set()
    for op in make_schedule(asked).ops:
        if isinstance(op, Loss):
            assert set(op.micro_batches) <= done
            lost |= set(op.micro_batches)
        elif isinstance(op, Visit) and op.direction == "backward":
            assert set(op.micro_batches) <= lost
        elif isinstance(op, Visit) and op.block == last:
            done |= set(op.micro_batches)


def copies(passes: int, asked: ScheduleRequest) -> tuple[list[int], list[int]]:
    """Return the copies of each of several passes in a row and the streamed visits of all."""
    counts, order = [], []
    slots = asked.slots
    for _ in range(passes):
        schedule = make_schedule(
            request(**{name: getattr(asked, name) for name in ScheduleRequest.__slots__} | {"slots": slots})
        )
        slots = schedule.slots
        counts.append(schedule.num_prefetches())
        order += [visit.block for visit in visits(schedule) if visit.slot is not None]
    return counts, order


@pytest.mark.parametrize("num_slots", range(2, 9))
@pytest.mark.parametrize("num_blocks", range(1, 9))
def test_blocks_kept_at_the_turn_around_and_the_step_boundary_are_not_copied_again(
    num_blocks: int, num_slots: int
) -> None:
    asked = request(num_blocks=num_blocks, slots=(None,) * num_slots)
    counts, _ = copies(3, asked)
    streamed = max(0, num_blocks - num_slots)
    assert counts == [num_blocks + streamed, 2 * streamed, 2 * streamed]


def test_a_run_whose_blocks_all_fit_copies_each_once() -> None:
    for order in ACCUMULATION_ORDERS:
        assert copies(3, request(slots=(None,) * 6, order=order))[0] == [6, 0, 0]


def fewest_copies(order: Sequence[int], num_slots: int) -> int:
    """Belady's bound: refill the slot whose block is needed last, knowing everything that follows."""
    slots: list[int] = []
    count = 0
    for position, block in enumerate(order):
        if block in slots:
            continue
        count += 1
        if len(slots) == num_slots:
            rest = order[position:]
            slots.remove(max(slots, key=lambda held: rest.index(held) if held in rest else len(order)))
        slots.append(block)
    return count


@settings(max_examples=60)
@given(
    num_blocks=st.integers(2, 8),
    num_slots=st.integers(2, 8),
    num_micro_batches=st.integers(1, 3),
    order=st.sampled_from(ACCUMULATION_ORDERS),
    resident=st.frozensets(st.integers(0, 7), max_size=3),
)
def test_no_order_of_copies_does_with_fewer_where_backward_reaches_the_first_block(
    num_blocks: int, num_slots: int, num_micro_batches: int, order: str, resident: frozenset[int]
) -> None:
    counts, order_of_visits = copies(
        3,
        request(
            num_blocks=num_blocks,
            slots=(None,) * num_slots,
            num_micro_batches=num_micro_batches,
            order=order,
            resident=resident & frozenset(range(num_blocks)),
        ),
    )
    assert sum(counts) == fewest_copies(order_of_visits, num_slots)


@pytest.mark.parametrize("num_slots", [3, 4, 5])
def test_a_forward_only_pass_keeps_all_but_two_slots_for_the_next(num_slots: int) -> None:
    """One slot is read and one is filled; a cycle of ascending visits need not push the others out."""
    counts, _ = copies(4, request(num_blocks=8, slots=(None,) * num_slots, lowest_backward=None))
    assert max(counts[1:]) <= 8 - (num_slots - 2)


@pytest.mark.parametrize("num_slots", [0, 1])
def test_fewer_than_two_slots_are_refused(num_slots: int) -> None:
    with pytest.raises(ValueError, match="at least 2 slots: one is read while the other is filled"):
        make_schedule(request(slots=(None,) * num_slots))


def test_a_wholly_resident_model_needs_no_slot() -> None:
    schedule = make_schedule(request(resident=frozenset(range(6)), slots=()))
    assert schedule.num_prefetches() == 0
    assert len(visits(schedule)) == 12


@pytest.mark.parametrize("lowest", [4, 5])
def test_where_backward_stops_early_kept_slots_save_copies(lowest: int) -> None:
    """With four slots, 3 micro-batches of 6 forward and 1 or 2 backward visits would else copy 6 blocks each."""
    asked = request(slots=(None,) * 4, order=MICRO_BATCH_MAJOR, lowest_backward=lowest)
    counts, _ = copies(3, asked)
    assert counts[2] <= 3 * 4


@given(requests())
def test_head_chunks_are_visited_in_ascending_order_between_the_last_forward_and_the_loss(
    asked: ScheduleRequest,
) -> None:
    ops = [op for op in make_schedule(asked).ops if isinstance(op, Visit | Loss)]
    chunks = [asked.num_blocks + chunk for chunk in range(asked.num_head_chunks)]
    for index, op in enumerate(ops):
        if isinstance(op, Loss):
            before = ops[index - len(chunks) - 1 : index]
            assert [visit.block for visit in before if isinstance(visit, Visit)] == [
                asked.num_blocks - 1,
                *chunks,
            ]
            assert all(
                visit.micro_batches == op.micro_batches for visit in before if isinstance(visit, Visit)
            )
