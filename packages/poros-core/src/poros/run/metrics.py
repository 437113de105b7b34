"""``metrics.jsonl``, one JSON object per step and evaluation, and ``samples.jsonl``, one per answer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from poros.run.events import EvalEvent, Reporter, RunResult, SampleEvent, StartEvent, StepEvent
from poros.run.lines_file import LinesFile

__all__ = ["METRICS_FILE", "SAMPLES_FILE", "MetricsFile", "SamplesFile", "record_files"]

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


class _RecordFile(Reporter):
    """A part of the run's own record: a failure to write it ends the run, unlike one of a reporter."""

    def __init__(self, path: Path) -> None:
        self._lines = LinesFile(path)

    def on_start(self, event: StartEvent) -> None:
        """Open the file behind the last step that counts."""
        self._lines.open(event.first_step)

    def on_end(self, result: RunResult) -> None:
        """Close the file."""
        self._lines.close()

    def on_close(self) -> None:
        """Close the file, also after a failure."""
        self._lines.close()


class MetricsFile(_RecordFile):
    """Steps and evaluations."""

    def on_step(self, event: StepEvent) -> None:
        """Append a step."""
        self._lines.append(dataclasses.asdict(event))

    def on_eval(self, event: EvalEvent) -> None:
        """Append an evaluation."""
        self._lines.append(dataclasses.asdict(event))


class SamplesFile(_RecordFile):
    """Answers to the sample prompts."""

    def on_sample(self, event: SampleEvent) -> None:
        """Append an answer."""
        self._lines.append(dataclasses.asdict(event))


def record_files(output: Path, *, samples: bool) -> list[Reporter]:
    """Return what writes the record of a run in ``output``, answers included where there are prompts."""
    answers = [SamplesFile(output / SAMPLES_FILE)] if samples else []
    return [MetricsFile(output / METRICS_FILE), *answers]
