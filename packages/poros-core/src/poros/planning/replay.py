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
        **{name: getattr(durations, name) for name in SCALARS},
    }


def replay(record: Mapping[str, Any]) -> tuple[Played, Sequence[Span]]:
    """Play a recorded pass through the schedule again.

    Args:
        record: of `timeline_record`, after a way through JSON.

    Returns:
        The pass, and its stretches in the order of the schedule.
    """
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
    )
    spans: list[Span] = []
    return play(schedule, durations, spans), spans
