"""``metrics.jsonl``: one JSON object per step and evaluation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, TextIO

from poros.checkpoint import atomic_write_bytes
from poros.errors import OutputError
from poros.run.events import EvalEvent, Reporter, RunResult, StartEvent, StepEvent

__all__ = ["METRICS_FILE", "MetricsFile"]

METRICS_FILE = "metrics.jsonl"


class MetricsFile(Reporter):
    """Appends events to a file; each line is on its way to the disk before the next step begins.

    A resumed run first drops the lines of steps that it is going to repeat, and a last line that a killed process
    left unfinished.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def on_start(self, event: StartEvent) -> None:
        """Open the file behind the last step that counts."""
        kept = _lines_up_to(self.path, event.first_step)
        atomic_write_bytes(self.path, "".join(kept).encode())
        self._file = self.path.open("a", encoding="utf-8")

    def on_step(self, event: StepEvent) -> None:
        """Append a step."""
        self._write(dataclasses.asdict(event))

    def on_eval(self, event: EvalEvent) -> None:
        """Append an evaluation."""
        self._write(dataclasses.asdict(event))

    def on_end(self, result: RunResult) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Close the file, also after a failure."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, value: dict[str, Any]) -> None:
        if self._file is None:  # evaluated by hand, outside of a run
            return
        try:
            self._file.write(json.dumps(value) + "\n")
            self._file.flush()
        except OSError as error:
            raise OutputError(f"Cannot write {self.path}: {error.strerror or error}.") from error


def _lines_up_to(path: Path, step: int) -> list[str]:
    """Return the complete lines of steps up to ``step``."""
    if step == 0 or not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            complete = line.endswith("\n") and json.loads(line)["step"] <= step
        except (ValueError, KeyError, TypeError):
            continue
        if complete:
            kept.append(line)
    return kept
