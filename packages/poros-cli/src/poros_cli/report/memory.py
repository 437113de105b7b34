"""Device and host memory over the steps, against the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poros.units import format_gb
from poros_cli.report.charts import Chart, Series, draw
from poros_cli.report.curves import NOT_RECORDED, level, values
from poros_cli.report.run_files import RunFiles

__all__ = ["memory_charts", "terms"]

# A limit that is further above everything else would press the rest to the floor: it is named below instead.
NEAR = 2


def memory_charts(run: RunFiles) -> tuple[list[Chart], list[str]]:
    """Return device and host memory over the steps against the plan, and why one is missing."""
    device, host = (_terms(run.record, f"predicted_{where}_bytes") for where in ("device", "host"))
    budget = run.record.get("budget") or {}
    on_device = values(run, "peak_device_bytes")
    charts, notes = [], []
    if on_device:
        limits = [("predicted peak", "c3", device), ("allowed or free", "c4", budget.get("device_bytes"))]
        charts.append(_memory(run, "Device memory", "peak of the process so far", on_device, limits))
    elif run.steps:
        notes.append("The run was on the CPU, where what the plan puts on the device is host memory too.")
        host = host + device if host is not None and device is not None else None
    grown = values(run, "grown_host_bytes")
    if grown:
        limits = [
            ("predicted peak", "c3", host),
            ("free before the run, or allowed", "c4", budget.get("host_bytes")),
        ]
        charts.append(_memory(run, "Host memory", "more than before loading, after the step", grown, limits))
    elif run.steps:
        notes.append(f"Host memory over time: {NOT_RECORDED}")
    return [chart for chart in charts if chart is not None], notes


def _memory(
    run: RunFiles,
    title: str,
    name: str,
    points: list[tuple[float, float]],
    limits: list[tuple[str, str, Any]],
) -> Chart | None:
    """Draw measured bytes beside the first limit, and beside the others where they are near enough to show both."""
    measured = Series(name=name, colour="c1", points=points, combine=max)
    highest = max(value for _, value in points)
    near: list[Series] = []
    notes = []
    for meaning, colour, value in limits:
        if value is None:
            continue
        if near and value > NEAR * max(highest, near[0].points[0][1]):
            notes.append(f"{meaning.capitalize()}: {format_gb(value)}.")
        else:
            near.append(Series(name=meaning, colour=colour, points=level(run, value), dashed=True))
    return draw(title, [measured, *near], label=_memory_label, from_zero=True, note=" ".join(notes))


def _memory_label(count: float) -> str:
    return "0" if not count else format_gb(count).replace(".00 ", " ")


def _terms(record: Mapping[str, Any], name: str) -> int | None:
    return sum(record[name].values()) if record.get(name) else None


def terms(record: Mapping[str, Any], where: str) -> list[tuple[str, str, int]]:
    """Return the predicted memory terms of ``device`` or ``host``, largest first, with their share in per cent."""
    found = record.get(f"predicted_{where}_bytes") or {}
    ordered = sorted(((name, size) for name, size in found.items() if size), key=lambda item: -item[1])
    largest = ordered[0][1] if ordered else 1
    return [(name, format_gb(size), round(100 * size / largest)) for name, size in ordered]
