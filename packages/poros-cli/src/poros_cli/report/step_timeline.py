"""The timeline of one pass as bars: the link above, compute below, and where compute waits."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from poros.planning.replay import replay
from poros.planning.timeline import Span
from poros_cli.report.run_files import RunFiles

__all__ = ["Lane", "StepTimeline", "step_timeline"]

# Bars are drawn into this width and stretched to the page's.
UNITS = 1000
# Outlines would cover more bars than this on a phone.
MAX_OUTLINED = 60
# A wait that is shorter than this part of the pass is rounding.
LEAST_WAIT = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """Bars of one row: its name, the picture, and how much of the pass it is busy."""

    name: str
    svg: Markup
    busy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimeline:
    """What the page says about one step.

    Attributes:
        lanes: of the planned pass; empty where the run recorded none.
        seconds: length of the planned pass.
        caption: what the lanes are.
        measured: how the measured steps divide, in a sentence; empty without a step.
    """

    lanes: tuple[Lane, ...]
    seconds: str
    caption: str
    measured: str


def step_timeline(run: RunFiles) -> StepTimeline:
    """Return the planned pass, which is all that a run records visit by visit, and the measured sums beside it."""
    measured = _measured(run)
    record = run.record.get("predicted_timeline")
    if record is None:
        return StepTimeline(
            lanes=(), seconds="", caption="This run recorded no planned timeline.", measured=measured
        )
    played, spans = replay(record)
    compute = [span for span in spans if span.lane == "compute"]
    waits = list(_waits(compute, played.seconds))
    waited = sum(span.seconds for span in waits)
    passes = record["passes"]
    caption = (
        "Planned, not measured: the schedule of this run played through with the durations that its prediction was "
        "made from; a run does not time single visits. "
        + (
            f"A step is {passes} such passes, one per micro-batch"
            if passes > 1
            else "A step is one such pass"
        )
        + " and the optimizer."
    )
    reads = [span for span in spans if span.lane == "disk"]
    lanes = (
        *([_lane("Reads from the disk", reads, played.seconds)] if reads else []),
        _lane("Copies to the device", [span for span in spans if span.lane == "copy"], played.seconds),
        _lane("Compute", [*compute, *waits], played.seconds, busy=played.compute_seconds, waited=waited),
    )
    return StepTimeline(lanes=lanes, seconds=_duration(played.seconds), caption=caption, measured=measured)


def _waits(compute: Iterable[Span], total: float) -> Iterable[Span]:
    """Yield the gaps between visits, where compute waits for a copy."""
    end = 0.0
    for span in compute:
        if span.start - end > LEAST_WAIT * total:
            yield Span("compute", "stall", span.block, end, span.start - end)
        end = span.start + span.seconds


def _lane(
    name: str, spans: list[Span], total: float, *, busy: float | None = None, waited: float = 0.0
) -> Lane:
    busy = sum(span.seconds for span in spans) if busy is None else busy
    bars = "".join(
        f'<rect class="{span.what if span.lane == "compute" else "copy"}" x="{UNITS * span.start / total:.2f}" '
        f'width="{UNITS * span.seconds / total:.2f}" height="1"><title>{_describe(span)}</title></rect>'
        for span in spans
    )
    dense = " dense" if len(spans) > MAX_OUTLINED else ""
    svg = f'<svg class="bars{dense}" viewBox="0 0 {UNITS} 1" preserveAspectRatio="none">{bars}</svg>'
    said = f"{_duration(busy)}, {busy / total:.0%} of the pass" if spans else "nothing to copy"
    stalled = f"; waits {_duration(waited)} ({waited / total:.0%})" if waited else ""
    return Lane(name=name, svg=Markup(svg), busy=said + stalled)


def _describe(span: Span) -> str:
    of = "" if span.block is None else f" {span.block}"
    return f"{span.what}{of}: {_duration(span.seconds)} from {_duration(span.start)}"


def _measured(run: RunFiles) -> str:
    largest = run.largest_steps()
    if not largest:
        return ""
    seconds = statistics.median(step["seconds"] for step in largest)
    waited = statistics.median(step.get("exposed_copy_seconds") or 0.0 for step in largest)
    text = (
        f"Measured: the median of the {len(largest)} largest steps ({largest[0]['tokens']} tokens) took "
        f"{_duration(seconds)}, of which compute waited {_duration(waited)} for copies"
    )
    return text + _link_share(largest, run.record.get("rates") or {}) + "."


def _link_share(steps: list[Mapping[str, Any]], rates: Mapping[str, Any]) -> str:
    moved = statistics.median(step.get("h2d_bytes") or 0 for step in steps)
    rate = rates.get("link_bytes_per_second")
    if not moved or not rate:
        return ""
    origin = "measured" if rates.get("measured") else "assumed"
    return f"; what it moved keeps the link busy for {_duration(moved / rate)} at its {origin} rate"


def _duration(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us" if seconds else "0 s"
