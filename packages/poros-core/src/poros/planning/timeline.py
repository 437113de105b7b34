"""When copies and visits of one pass happen: the exact schedule, played through with durations instead of a device.

Copies follow each other on the link, visits on the compute stream; a visit waits for its copy, a copy for the release
of its slot. What a real pass hides is hidden here, and what it cannot hide shows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from poros.blocks.disk_ring import RING_BUFFERS
from poros.engine.offload import NUM_RING_ROWS
from poros.engine.schedule import Loss, Prefetch, Release, Schedule, ScheduleRequest, Visit, make_schedule

__all__ = ["Durations", "Played", "Span", "play", "steady_schedule"]

# How many visits before its own a row of boundary activations is called back.
ROWS_AHEAD = NUM_RING_ROWS - 1


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds of everything a pass does.

    Attributes:
        copy: per block, and per streamed vocabulary chunk behind them, from host to device.
        forward, backward: per block, its visits.
        head: the visit of one streamed vocabulary chunk.
        loss: head and loss of the pass, or what is left of it where the head is streamed.
        row_out, row_in: one boundary's hidden states to host memory and back; 0 where they stay on the device.
        disk: per block that comes from the disk, its read.
    """

    copy: Sequence[float]
    forward: Sequence[float]
    backward: Sequence[float]
    loss: float
    head: float = 0.0
    row_out: float = 0.0
    row_in: float = 0.0
    disk: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Played:
    """How a pass went: its length, and the parts of it that the compute stream, the link and the disk were busy."""

    seconds: float
    compute_seconds: float
    link_seconds: float
    disk_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of a pass.

    Attributes:
        lane: ``disk``, ``copy`` (the link) or ``compute``.
        what: ``read``, ``block``, ``row`` (both copies), ``forward``, ``backward``, ``head`` or ``loss``.
        block: its number, of a vocabulary chunk counted on behind the blocks; None where there is none.
        start, seconds: since the pass began.
    """

    lane: str
    what: str
    block: int | None
    start: float
    seconds: float


@functools.lru_cache(maxsize=4096)
def steady_schedule(
    num_blocks: int, resident: frozenset[int], num_slots: int, lowest_backward: int, num_head_chunks: int
) -> Schedule:
    """Return the schedule of a pass whose slots hold what the pass before left there."""

    def after(slots: tuple[int | None, ...]) -> Schedule:
        return make_schedule(
            ScheduleRequest(
                num_blocks=num_blocks,
                resident=resident,
                slots=slots,
                num_micro_batches=1,
                order="block-major",
                lowest_backward=lowest_backward,
                num_head_chunks=num_head_chunks,
            )
        )

    return after(after((None,) * num_slots).slots)


def play(schedule: Schedule, durations: Durations, spans: list[Span] | None = None) -> Played:
    """Return how long a pass takes. At its beginning the link is idle and every slot holds what it is said to hold.

    Args:
        spans: receives every stretch in the order of the schedule; None keeps none.
    """

    def note(lane: str, what: str, block: int | None, end: float, seconds: float) -> None:
        if spans is not None and seconds:
            spans.append(Span(lane, what, block, end - seconds, seconds))

    compute = link = busy_compute = busy_link = out = back = disk = busy_disk = 0.0
    left: list[float] = []  # when each block that came from the disk has left the ring
    filled: dict[int, float] = {}
    released: dict[int, float] = {}
    outs: list[float] = []  # when each row of the way down has left
    begun = [0.0]  # when each visit began
    for op in schedule.ops:
        if isinstance(op, Prefetch):
            copy = durations.copy[op.block]
            link = max(link, released.get(op.slot, 0.0)) + copy
            busy_link += copy
            filled[op.slot] = link
            if (read := durations.disk.get(op.block)) is not None:
                buffer = left[-RING_BUFFERS] if len(left) >= RING_BUFFERS else 0.0
                disk = max(disk, buffer) + read
                busy_disk += read
                note("disk", "read", op.block, disk, read)
                # Copies of blocks that have been read already go first.
                filled[op.slot] = max(link, disk + copy)
                left.append(filled[op.slot])
            note("copy", "block", op.block, filled[op.slot], copy)
        elif isinstance(op, Release):
            released[op.slot] = compute
        elif isinstance(op, Loss):
            compute += durations.loss
            busy_compute += durations.loss
            note("compute", "loss", None, compute, durations.loss)
        elif isinstance(op, Visit):
            start = compute if op.slot is None else max(compute, filled.get(op.slot, 0.0))
            forward, backward = op.direction == "forward", op.direction == "backward"
            if durations.row_out and forward and len(outs) >= NUM_RING_ROWS:
                start = max(start, outs[-NUM_RING_ROWS])
            if durations.row_in and backward:
                # A lane of their own, a few visits ahead, that takes its share of the link from the blocks.
                back = max(back, begun[max(0, len(begun) - ROWS_AHEAD)]) + durations.row_in
                link += durations.row_in
                busy_link += durations.row_in
                note("copy", "row", op.block, link, durations.row_in)
                start = max(start, back)
            begun.append(start)
            spent = (
                durations.forward[op.block]
                if forward
                else durations.backward[op.block]
                if backward
                else durations.head
            )
            compute = start + spent
            busy_compute += spent
            note("compute", op.direction, op.block, compute, spent)
            if durations.row_out and forward:
                out = max(out, compute) + durations.row_out
                outs.append(out)
    return Played(compute, busy_compute, busy_link, busy_disk)
