"""Runs on Weights & Biases, offline where nobody is logged in."""

from __future__ import annotations

import html
import importlib
import os
from pathlib import Path
from typing import Any, ClassVar

from poros.checkpoint import atomic_write_bytes
from poros.run import EvalEvent, Reporter, RunResult, SampleEvent, StartEvent, StepEvent
from poros_cli.reporters.values import eval_values, missing_package, step_values

__all__ = ["WandbReporter"]

FOLDER = "wandb"
# Inside it: a resumed run goes on under the same name.
ID_FILE = "poros-run-id"


class WandbReporter(Reporter):
    """Logs to the run that ``WANDB_PROJECT``, ``WANDB_NAME`` and W&B's other variables describe.

    Nobody is asked for a login: without a key, and without ``WANDB_MODE``, the run is written to ``output/wandb`` for
    ``wandb sync``.
    """

    name: ClassVar[str] = "wandb"
    owned: ClassVar[tuple[str, ...]] = (FOLDER,)

    def __init__(self, output: Path) -> None:
        """Import the package; raises `ConfigError` without it."""
        try:
            self._wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise missing_package(self.name, error) from error
        self._output = output
        self._run: Any = None

    def on_start(self, event: StartEvent) -> None:
        """Start the run, or go on with the one of the checkpoint."""
        id_file = self._output / FOLDER / ID_FILE
        known = id_file.read_text().strip() if event.first_step and id_file.exists() else None
        logged_in = "WANDB_MODE" in os.environ or self._wandb.api.api_key is not None
        self._run = self._wandb.init(
            dir=str(self._output),
            config=event.record.get("config") or event.record["settings"],
            id=known,
            resume="allow" if known else None,
            mode=None if logged_in else "offline",
            settings=self._wandb.Settings(console="off"),
        )
        id_file.parent.mkdir(exist_ok=True)
        atomic_write_bytes(id_file, self._run.id.encode())
        # Not W&B's own count of calls: a resumed run repeats steps.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def on_step(self, event: StepEvent) -> None:
        """Log the numbers of a step."""
        self._log(step_values(event), event.step)

    def on_eval(self, event: EvalEvent) -> None:
        """Log the numbers of an evaluation."""
        self._log(eval_values(event), event.step)

    def on_sample(self, event: SampleEvent) -> None:
        """Log an answer."""
        text = f"<pre>{html.escape(event.prompt)}\n---\n{html.escape(event.text)}</pre>"
        self._log({f"samples/{event.index}": self._wandb.Html(text, inject=False)}, event.step)

    def on_end(self, result: RunResult) -> None:
        """End the run."""
        self._finish(0)

    def on_close(self) -> None:
        """End a run that did not end by itself as failed."""
        self._finish(1)

    def _log(self, values: dict[str, Any], step: int) -> None:
        if self._run is not None:  # evaluated by hand, outside of a run
            self._run.log({**values, "step": step})

    def _finish(self, exit_code: int) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=exit_code)
