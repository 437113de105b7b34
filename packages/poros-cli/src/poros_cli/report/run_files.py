"""What a run left behind: ``run.json`` and ``metrics.jsonl``, and what is odd about them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poros.checkpoint.json_files import read_json_object
from poros.errors import CheckpointError, OutputError, explain
from poros.run.metrics import METRICS_FILE
from poros.run.record import RUN_FILE
from poros.units import ranges

__all__ = ["RunFiles", "read_run"]

# Every run has written these; a JSON file without them is something else.
ALWAYS = ("fingerprint", "model", "plan", "settings")
MAPPINGS = (
    *ALWAYS,
    *("budget", "config", "data", "predicted_device_bytes", "predicted_host_bytes", "predicted_step"),
    *("predicted_timeline", "rates", "result"),
)
STEP_FIELDS = ("loss", "learning_rate", "grad_norm", "tokens", "seconds", "tokens_per_second")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """A run as its files tell it.

    Attributes:
        folder: of the run.
        record: ``run.json``.
        steps: lines of ``metrics.jsonl`` about steps, ascending; of a step that is there twice, the later line.
        evaluations: its lines about evaluations, likewise.
        oddities: sentences about what is missing or damaged.
    """

    folder: Path
    record: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    oddities: tuple[str, ...]

    def largest_steps(self) -> list[Mapping[str, Any]]:
        """Return the steps with the most positions: those that the prediction is about."""
        most = max((step["tokens"] for step in self.steps), default=0)
        return [step for step in self.steps if step["tokens"] == most]


def read_run(folder: Path) -> RunFiles:
    """Read the output folder of a run, finished or not.

    Raises:
        OutputError: it is no run.
        CheckpointError: ``run.json`` is damaged.
    """
    path = folder / RUN_FILE
    if not path.is_file():
        got = "no such folder" if not folder.exists() else "a file" if folder.is_file() else f"no {RUN_FILE}"
        raise OutputError(
            explain(
                "Cannot report",
                expected=f"the output folder of a run, which holds {RUN_FILE}",
                got=got,
                where=str(folder),
                next_step="Name the folder that `output` of the training named",
            )
        )
    record = read_json_object(path)
    for name in MAPPINGS:
        wanted = name in ALWAYS or record.get(name) is not None
        if wanted and not isinstance(record.get(name), Mapping):
            raise CheckpointError(
                explain(
                    "Cannot report",
                    expected=f"the record of a run, with an object `{name}`",
                    got=type(record[name]).__name__ if name in record else "none",
                    where=str(path),
                )
            )
    steps, evaluations, oddities = _read_metrics(folder / METRICS_FILE)
    return RunFiles(
        folder=folder, record=record, steps=steps, evaluations=evaluations, oddities=tuple(oddities)
    )


def _read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return [], [], [f"{METRICS_FILE} is missing: no step can be shown."]
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror or error}.") from error
    steps: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, dict[str, Any]] = {}
    damaged, repeated, oddities = [], 0, []
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        torn = number == len(lines) and line  # every line of a run ends with a line break
        kind = _kind(line)
        if torn:
            oddities.append(f"The last line of {METRICS_FILE} is incomplete and left out.")
        elif kind is None:
            damaged += [number] if line.strip() else []
        else:
            value = json.loads(line)
            kept = steps if kind == "step" else evaluations
            repeated += value["step"] in kept
            kept[value["step"]] = value
    if damaged:
        oddities.append(f"Left out of {METRICS_FILE}, because they cannot be read: lines {ranges(damaged)}.")
    if repeated:
        oddities.append(
            f"{METRICS_FILE} has {repeated} lines for steps that it had before; the later ones count."
        )
    return [steps[step] for step in sorted(steps)], [evaluations[s] for s in sorted(evaluations)], oddities


def _kind(line: str) -> str | None:
    """Return ``step`` or ``evaluation``; None for anything that is not such a line."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or type(value.get("step")) is not int:
        return None
    numbers = all(v is None or isinstance(v, int | float) for v in value.values())
    if numbers and all(isinstance(value.get(name), int | float) for name in STEP_FIELDS):
        return "step"
    return "evaluation" if numbers and isinstance(value.get("eval_loss"), int | float) else None
