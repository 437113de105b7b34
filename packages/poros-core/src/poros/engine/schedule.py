"""The ordered prefetch, visit and release list of one pass. Pure: no torch, no device, no clock.

A *visit* is one stay of a block on the device. Streamed blocks visit through slots; resident blocks need none.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Loss", "Op", "Prefetch", "Release", "Schedule", "ScheduleRequest", "Visit", "make_schedule"]

Direction = Literal["forward", "backward", "head"]


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Start copying ``block`` into ``slot``; the copy waits until the slot is released."""

    block: int
    slot: int


@dataclass(frozen=True, slots=True)
class Visit:
    """Run ``block`` for ``micro_batches``, in ascending order, on the bytes in ``slot`` (None: resident).

    With direction ``head`` it is a vocabulary chunk of a streamed head: chunk ``c`` counts as block ``num_blocks + c``.
    """

    block: int
    slot: int | None
    direction: Direction
    micro_batches: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """The last reader of ``slot`` has been issued: later copies into it may follow."""

    slot: int


@dataclass(frozen=True, slots=True)
class Loss:
    """Final norm, head and cross-entropy of ``micro_batches``, whose last block outputs are complete."""

    micro_batches: tuple[int, ...]


Op = Prefetch | Visit | Release | Loss


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleRequest:
    """What a schedule follows from.

    Attributes:
        num_blocks: blocks of the model.
        resident: blocks that never move.
        slots: what every slot holds when the pass begins (a block, or None).
        num_micro_batches: micro-batches of the pass.
        order: ``block-major`` or ``micro-batch-major``.
        lowest_backward: backward visits end at this block; None for a forward-only pass.
        num_head_chunks: vocabulary chunks that are streamed between forward and backward; 0 for a resident head.
    """

    num_blocks: int
    resident: frozenset[int]
    slots: tuple[int | None, ...]
    num_micro_batches: int
    order: str
    lowest_backward: int | None
    num_head_chunks: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """The operations of one pass and what the slots hold after it."""

    ops: tuple[Op, ...]
    slots: tuple[int | None, ...]

    def num_prefetches(self) -> int:
        """Return how many blocks the pass copies."""
        return sum(isinstance(op, Prefetch) for op in self.ops)


@functools.lru_cache(maxsize=64)  # every step of a run but the first asks for the same one
def make_schedule(request: ScheduleRequest) -> Schedule:
    """Order the pass so that copies start early and no block is copied needlessly.

    A slot that must be refilled is the one whose block is needed farthest in the future (Belady's rule; the whole
    pass is known). Where that is the slot being read, a block that is not needed next waits for it instead of pushing
    out one that is needed sooner; every copy still has a whole visit to hide behind. The next pass starts with a
    forward over block 0, 1, ...: blocks still in a slot at the turn-around or at the step boundary are not copied
    again.

    Raises:
        ValueError: fewer than two slots while a block is streamed.
    """
    streams = len(request.resident) < request.num_blocks or request.num_head_chunks
    if streams and len(request.slots) < 2:
        raise ValueError("streaming needs at least 2 slots: one is read while the other is filled")
    visits = list(_visits(request))
    streamed = [(i, v.block) for i, v in enumerate(visits) if isinstance(v, Visit) and v.slot is not None]
    # Visits of the pass that follows: they rank slots but are never prefetched here, because an evaluation or the end
    # of the run may come first.
    following = [
        (len(visits) + block, block) for block in range(request.num_blocks) if block not in request.resident
    ]
    assigner = _SlotAssigner(streamed + following, list(request.slots))
    ops: list[Op] = []
    position = 0
    ahead = 0  # everything that is visited before this one is in a slot
    for index, visit in enumerate(visits):
        if not isinstance(visit, Visit) or visit.slot is None:
            ops.append(visit)
            continue
        if visit.block not in assigner.slots:
            ops.append(assigner.fill(visit.block, position, busy=None))
        slot = assigner.slots.index(visit.block)
        ahead = max(ahead, position + 1)
        while ahead < len(streamed):
            block = streamed[ahead][1]
            if block not in assigner.slots:
                if not assigner.should_fill(position, ahead, busy=slot):
                    break
                ops.append(assigner.fill(block, position, busy=slot))
            ahead += 1
        ops.append(Visit(visit.block, slot, visit.direction, visit.micro_batches))
        ops.append(Release(slot))
        position += 1
        assert streamed[position - 1][0] == index
    return Schedule(tuple(ops), tuple(assigner.slots))


def _visits(request: ScheduleRequest) -> Iterator[Visit | Loss]:
    """Yield visits in order; streamed ones carry slot 0 as a mark until a slot is assigned."""
    everyone = tuple(range(request.num_micro_batches))
    groups: Sequence[tuple[int, ...]] = (
        [everyone] if request.order == "block-major" else [(j,) for j in everyone]
    )

    def mark(block: int) -> int | None:
        return None if block in request.resident else 0

    for group in groups:
        for block in range(request.num_blocks):
            yield Visit(block, mark(block), "forward", group)
        for chunk in range(request.num_head_chunks):
            yield Visit(request.num_blocks + chunk, 0, "head", group)
        yield Loss(group)
        if request.lowest_backward is not None:
            for block in reversed(range(request.lowest_backward, request.num_blocks)):
                yield Visit(block, mark(block), "backward", group)


class _SlotAssigner:
    """Tracks slot contents along the pass and picks the slot to refill."""

    def __init__(self, uses: list[tuple[int, int]], slots: list[int | None]) -> None:
        self._never = len(uses)
        self._uses: dict[int, list[int]] = {}
        for position, (_, block) in enumerate(uses):
            self._uses.setdefault(block, []).append(position)
        self.slots = slots

    def _next_use(self, slot: int, after: int) -> int:
        """Return the first streamed visit at or after ``after`` that reads what ``slot`` holds."""
        block = self.slots[slot]
        if block is None:
            return self._never + 1
        positions = self._uses.get(block, [])
        index = bisect_left(positions, after)
        return positions[index] if index < len(positions) else self._never

    def _candidate(self, position: int, busy: int | None) -> int:
        free = [slot for slot in range(len(self.slots)) if slot != busy]
        # The busy slot's block is being read now, so look for uses after this visit; ties go to the lowest slot.
        return max(free, key=lambda slot: (self._next_use(slot, position + (busy is not None)), -slot))

    def should_fill(self, position: int, ahead: int, *, busy: int) -> bool:
        """Whether some slot's block is needed later than the visit at ``ahead``, and it does not pay to wait."""
        needed = self._next_use(self._candidate(position, busy), position + 1)
        can_wait = ahead > position + 1 and self._next_use(busy, position + 1) > needed
        return needed > ahead and not can_wait

    def fill(self, block: int, position: int, *, busy: int | None) -> Prefetch:
        slot = self._candidate(position, busy)
        self.slots[slot] = block
        return Prefetch(block, slot)
