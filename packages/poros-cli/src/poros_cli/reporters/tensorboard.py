"""Event files for TensorBoard in the run's own folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from poros.run import EvalEvent, Reporter, RunResult, SampleEvent, StartEvent, StepEvent
from poros_cli.reporters.values import eval_values, missing_package, step_values

__all__ = ["TensorBoardReporter"]

FOLDER = "tensorboard"


class TensorBoardReporter(Reporter):
    """Writes ``output/tensorboard``; look at it with ``tensorboard --logdir``."""

    name: ClassVar[str] = "tensorboard"
    owned: ClassVar[tuple[str, ...]] = (FOLDER,)

    def __init__(self, output: Path) -> None:
        """Import the package; raises `ConfigError` without it."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing_package(self.name, error) from error
        self._make: Any = SummaryWriter
        self._folder = output / FOLDER
        self._writer: Any = None

    def on_start(self, event: StartEvent) -> None:
        """Open the event file; steps that a resumed run repeats are taken out of the curves."""
        purge = event.first_step + 1 if event.first_step else None
        self._writer = self._make(str(self._folder), purge_step=purge)

    def on_step(self, event: StepEvent) -> None:
        """Write the numbers of a step."""
        self._write(step_values(event), event.step)

    def on_eval(self, event: EvalEvent) -> None:
        """Write the numbers of an evaluation."""
        self._write(eval_values(event), event.step)

    def on_sample(self, event: SampleEvent) -> None:
        """Write an answer as text."""
        if self._writer is not None:
            # An indented block: TensorBoard reads Markdown.
            text = "\n".join(f"    {line}" for line in f"{event.prompt}\n---\n{event.text}".splitlines())
            self._writer.add_text(f"samples/{event.index}", text, event.step)

    def on_end(self, result: RunResult) -> None:
        """Close the event file."""
        self.on_close()

    def on_close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, values: dict[str, float], step: int) -> None:
        if self._writer is not None:  # evaluated by hand, outside of a run
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
