"""The planned timeline of one pass as a few numbers in a run's record, and back to its stretches.

What is kept are the durations that the prediction was made from, block by block, equal neighbours together: the
schedule follows from the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from poros.blocks.placement import spread_evenly
from poros.model import MetaModel
from poros.planning.device_terms import head_chunk_bytes, num_slots
from poros.planning.facts import model_facts
from poros.planning.planner import PlannedRun
from poros.planning.step_time import pass_durations
from poros.planning.timeline import Durations, Played, Span, play, steady_schedule
from poros.settings import Numerics

__all__ = ["replay", "timeline_record"]

SCALARS = ("head", "loss", "row_out", "row_in")
# Things that are streamed times slots that they may go to: thousands of times a real model's, and a second of planning.
# A record is read from a file: its numbers must not decide how long that takes.
MAX_CHOICES = 10**6


def timeline_record(
    meta: MetaModel, numerics: Numerics, planned: PlannedRun, device_type: str
) -> dict[str, Any]:
    """Return what `replay` needs, as JSON values.

    Args:
        meta: the model without weights.
        numerics: settings that decide bits.
        planned: the plan, the step it was made for and the rates.
        device_type: ``cuda`` or ``cpu``.
    """
    facts, plan = model_facts(meta, numerics), planned.plan
    _, durations, passes = pass_durations(facts, planned.rates, numerics, plan, planned.shape, device_type)
    chunks = len(head_chunk_bytes(facts, numerics, plan))
    blocks = zip(durations.copy, durations.forward, durations.backward, strict=False)  # chunks only copy
    return {
        "passes": passes,
        "num_blocks": facts.num_blocks,
        "resident_blocks": plan.resident_blocks if plan.residency == "streamed" else facts.num_blocks,
        "num_slots": num_slots(facts, plan, chunks),
        "lowest_backward": facts.lowest_adapted,
        "blocks": [[len(list(same)), *seconds] for seconds, same in itertools.groupby(blocks)],
        "chunk_copies": list(durations.copy[facts.num_blocks :]),
        "disk": [[block, seconds] for block, seconds in durations.disk.items()],
        **{name: getattr(durations, name) for name in SCALARS},
    }


def replay(record: Mapping[str, Any]) -> tuple[Played, Sequence[Span]]:
    """Play a recorded pass through the schedule again.

    Args:
        record: of `timeline_record`, after a way through JSON.

    Returns:
        The pass, and its stretches in the order of the schedule.

    Raises:
        ValueError: the record's numbers contradict each other, or are those of no model.
    """
    _check_counts(record)
    blocks = [seconds for count, *seconds in record["blocks"] for _ in range(count)]
    copy, forward, backward = (list(column) for column in zip(*blocks, strict=True))
    chunks = record["chunk_copies"]
    schedule = steady_schedule(
        record["num_blocks"],
        spread_evenly(record["resident_blocks"], record["num_blocks"]),
        record["num_slots"],
        record["lowest_backward"],
        len(chunks),
    )
    durations = Durations(
        copy=[*copy, *chunks],
        forward=forward,
        backward=backward,
        **{name: record[name] for name in SCALARS},
        disk=dict(record.get("disk", ())),  # runs from before there was a disk tier have none
    )
    spans: list[Span] = []
    return play(schedule, durations, spans), spans


def _check_counts(record: Mapping[str, Any]) -> None:
    num_blocks, chunks = record["num_blocks"], len(record["chunk_copies"])
    counts = [count for count, *_ in record["blocks"]]
    whole = (num_blocks, record["resident_blocks"], record["num_slots"], record["lowest_backward"], *counts)
    if not all(type(value) is int and value >= 0 for value in whole):
        raise ValueError("counts of blocks and slots are whole numbers")
    things = num_blocks + chunks
    if sum(counts) != num_blocks or max(record["resident_blocks"], record["lowest_backward"]) > num_blocks:
        raise ValueError(f"{sum(counts)} durations, resident blocks and a lowest one of {num_blocks} blocks")
    if record["num_slots"] > max(2, things) or things * max(1, record["num_slots"]) > MAX_CHOICES:
        raise ValueError(f"{record['num_slots']} slots for {things} blocks and chunks")
