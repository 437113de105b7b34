"""The tables and sentences of the page, from a run's record."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from poros.units import format_bytes, format_gb
from poros_cli.plan_text import BINDINGS, budget_sentence, plan_sentence
from poros_cli.report.curves import NOT_RECORDED, number
from poros_cli.report.run_files import RunFiles

__all__ = ["comparison", "plan_lines", "receipts", "state", "tiles"]

UNKNOWN = "not recorded"
Row = tuple[str, str]


def state(run: RunFiles) -> tuple[str, str]:
    """Return how the run ended, as a word (a CSS class too) and a sentence."""
    record, total = run.record, run.record["fingerprint"].get("num_steps", "?")
    result, done = record.get("result"), run.steps[-1]["step"] if run.steps else 0
    first = record.get("first_step") or 0
    resumed = f" It was resumed after step {first}." if first else ""
    if record.get("failure"):
        return "failed", f"Stopped after step {done} of {total}: {record['failure']}{resumed}"
    if result is None:
        return "unfinished", (
            f"No end is recorded: {done} of {total} steps are, and the run is still going on or its process was "
            f"ended.{resumed}"
        )
    if result.get("interrupted"):
        return "interrupted", (
            f"Interrupted after step {result.get('steps')} of {total}; `--resume` goes on from there.{resumed}"
        )
    if result.get("stopped_early"):
        return "finished", (
            f"Stopped early after step {result.get('steps')} of {total}: held-out loss no longer improved.{resumed}"
        )
    return "finished", f"All {result.get('steps')} steps are done.{resumed}"


def tiles(run: RunFiles) -> list[Row]:
    """Return the few numbers of the page's head."""
    steps, shown = run.steps, []
    if steps:
        losses = " to ".join(f"{step['loss']:.4f}" for step in (steps[0], steps[-1])[: len(steps)])
        shown.append(("loss", losses))
    if run.evaluations:
        last = run.evaluations[-1]["eval_loss"]
        perplexity = f", perplexity {math.exp(last):.4g}" if last < 100 else ""
        shown.append(("held-out loss", f"{last:.4f}{perplexity}"))
        best = min(run.evaluations, key=lambda event: event["eval_loss"])
        shown.append(("best held-out loss", f"{best['eval_loss']:.4f} after step {best['step']}"))
    if steps:
        seconds = sum(step["seconds"] for step in steps)
        tokens = sum(step["tokens"] for step in steps)
        shown.append(("steps", f"{len(steps)} in {seconds:.4g} s"))
        shown.append(("tokens per second", number(tokens / seconds) if seconds else "?"))
        moved = sum(step.get("h2d_bytes") or 0 for step in steps)
        waited = sum(step.get("exposed_copy_seconds") or 0.0 for step in steps)
        shown.append(("moved to the device", f"{format_bytes(moved)}, waited {waited:.3g} s"))
        if peak := max(step.get("peak_device_bytes") or 0 for step in steps):
            shown.append(("peak device memory", format_gb(peak)))
    return shown


def comparison(run: RunFiles) -> list[tuple[str, str, str]]:
    """Return (what, predicted, measured)."""
    record, result = run.record, run.record.get("result") or {}
    predicted = record.get("predicted_step") or {}
    device, host = (sum((record.get(f"predicted_{w}_bytes") or {}).values()) for w in ("device", "host"))
    peak = result.get("peak_device_bytes") or max(
        (s.get("peak_device_bytes") or 0 for s in run.steps), default=0
    )
    grown = result.get("grown_host_bytes") or max(
        (step.get("grown_host_bytes") or 0 for step in run.steps), default=0
    )
    largest = [step["seconds"] for step in run.largest_steps()]
    taken = result.get("step_seconds") or (statistics.median(largest) if largest else None)
    rows = [
        (
            "largest steps, median",
            f"{number(predicted['seconds'])} s" if predicted.get("seconds") else UNKNOWN,
            f"{number(taken)} s" if taken else UNKNOWN,
        )
    ]
    if peak:
        rows.append(("peak device memory", format_gb(device), format_gb(peak)))
    rows.append(
        (
            "peak host memory, added to the process" + ("" if peak else " (the device is the CPU)"),
            format_gb(host if peak else host + device),
            format_gb(grown) if grown else UNKNOWN,
        )
    )
    return rows


def plan_lines(record: Mapping[str, Any]) -> list[str]:
    """Return the plan, what it was made under and what binds it, in sentences."""
    lines = [plan_sentence(record["plan"], record.get("num_blocks", 0))]
    if record.get("budget"):
        lines.append(budget_sentence(record["budget"]))
    if record.get("binding") in BINDINGS:
        lines.append(f"The step is {BINDINGS[record['binding']]}.")
    if record.get("rates"):
        lines.append(f"Rates behind the prediction: {record['rates'].get('origin', 'unknown')}.")
    return lines


def receipts(record: Mapping[str, Any]) -> tuple[str, list[Mapping[str, Any]]]:
    """Return what stands behind the architecture's bitwise claim on the run's platform, and its receipts."""
    model = record["model"]
    if "receipts" not in model:
        return NOT_RECORDED, []
    if model.get("status") != "validated":
        return "The architecture is user_asserted: no gate of Poros runs it, and nothing is claimed.", []
    return f"For the platform of this run: {model.get('platform')}.", model["receipts"]
