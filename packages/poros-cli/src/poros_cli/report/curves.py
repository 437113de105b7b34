"""The charts of a run: what the optimizer did, how fast, and in how much memory against the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poros.units import format_gb
from poros_cli.report.charts import Chart, Series, draw
from poros_cli.report.run_files import RunFiles

__all__ = ["NOT_RECORDED", "memory_charts", "number", "training_charts"]

# A limit that is further above everything else would press the rest to the floor: it is named below instead.
NEAR = 2
NOT_RECORDED = "Not recorded by the version of Poros that made this run."


def training_charts(run: RunFiles) -> list[Chart]:
    """Return loss, held-out loss, learning rate, gradient norm, speed and step time, as far as there are any."""
    held_out = [(e["step"], e["eval_loss"]) for e in run.evaluations]
    limit = run.record["fingerprint"].get("optimizer.max_grad_norm")
    predicted = run.record.get("predicted_step") or {}
    seconds, tokens = predicted.get("seconds"), predicted.get("tokens")
    rate = tokens / seconds if seconds and tokens else None
    charts = [
        draw(
            "Loss",
            [
                Series(
                    name="training, mean of the step's supervised tokens",
                    colour="c1",
                    points=_of(run, "loss"),
                ),
                Series(name="held-out rows", colour="c2", points=held_out),
            ],
            label=number,
            note="" if held_out else "No evaluation was recorded.",
        ),
        draw(
            "Learning rate",
            [Series(name="of the step", colour="c1", points=_of(run, "learning_rate"))],
            label=number,
            from_zero=True,
        ),
        draw(
            "Gradient norm",
            [
                Series(name="before clipping", colour="c1", points=_of(run, "grad_norm"), combine=max),
                Series(name="clipped to", colour="c3", points=_level(run, limit), dashed=True),
            ],
            label=number,
            from_zero=True,
        ),
        draw(
            "Tokens per second",
            [
                Series(name="measured, padding included", colour="c1", points=_of(run, "tokens_per_second")),
                Series(
                    name="predicted for the largest step", colour="c3", points=_level(run, rate), dashed=True
                ),
            ],
            label=number,
            from_zero=True,
            note="Evaluations and checkpoints are not in it.",
        ),
        draw(
            "Seconds per step",
            [
                Series(name="whole step", colour="c1", points=_of(run, "seconds")),
                Series(
                    name="of it, compute waited for copies",
                    colour="stall",
                    points=_of(run, "exposed_copy_seconds"),
                ),
                Series(
                    name="predicted for the largest step",
                    colour="c3",
                    points=_level(run, seconds),
                    dashed=True,
                ),
            ],
            label=number,
            from_zero=True,
        ),
    ]
    return [chart for chart in charts if chart is not None]


def memory_charts(run: RunFiles) -> tuple[list[Chart], list[str]]:
    """Return device and host memory over the steps against the plan, and why one is missing."""
    device, host = (_terms(run.record, f"predicted_{where}_bytes") for where in ("device", "host"))
    budget = run.record.get("budget") or {}
    on_device = _of(run, "peak_device_bytes")
    charts, notes = [], []
    if on_device:
        limits = [("predicted peak", "c3", device), ("allowed or free", "c4", budget.get("device_bytes"))]
        charts.append(_memory(run, "Device memory", "peak of the process so far", on_device, limits))
    elif run.steps:
        notes.append("The run was on the CPU, where what the plan puts on the device is host memory too.")
        host = host + device if host is not None and device is not None else None
    grown = _of(run, "grown_host_bytes")
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
            near.append(Series(name=meaning, colour=colour, points=_level(run, value), dashed=True))
    return draw(title, [measured, *near], label=_memory_label, from_zero=True, note=" ".join(notes))


def _memory_label(count: float) -> str:
    return "0" if not count else format_gb(count).replace(".00 ", " ")


def _of(run: RunFiles, name: str) -> list[tuple[float, float]]:
    return [(step["step"], step[name]) for step in run.steps if step.get(name) is not None]


def _level(run: RunFiles, value: float | None) -> list[tuple[float, float]]:
    """Return a horizontal line over the steps that were done."""
    if value is None or not run.steps:
        return []
    return [(step["step"], value) for step in (run.steps[0], run.steps[-1])]


def _terms(record: Mapping[str, Any], name: str) -> int | None:
    return sum(record[name].values()) if record.get(name) else None


def number(value: float) -> str:
    """Return a number in at most four digits."""
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    return f"{value:.4g}"
