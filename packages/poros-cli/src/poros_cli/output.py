"""What a run shows: warnings as single lines, progress, a summary."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from poros.run import (
    CheckpointEvent,
    EvalEvent,
    Reporter,
    RunResult,
    SampleEvent,
    StartEvent,
    StepEvent,
    WarmUpEvent,
)
from poros.units import format_bytes, format_gb
from poros_cli.plan_text import bought_sentence, plan_sentence, predicted_sentence

__all__ = ["ProgressReporter", "quiet_libraries", "show_summary"]

# Where the output is no terminal, a run prints about this many step lines.
MAX_PLAIN_LINES = 50
# Of a sample on the screen; samples.jsonl has all of it.
MAX_SAMPLE_CHARACTERS = 200
DEBUG_VARIABLE = "POROS_DEBUG"
# Addressed to the authors of libraries, not to somebody who trains a model.
NOT_FOR_USERS = (FutureWarning, DeprecationWarning, PendingDeprecationWarning)


@contextlib.contextmanager
def quiet_libraries(console: Console) -> Iterator[None]:
    """Show warnings as ``Warning: ...`` lines, each once; libraries' notes to developers only with ``POROS_DEBUG``."""
    import transformers

    verbosity = transformers.logging.get_verbosity()
    seen: set[str] = set()

    def show(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
        if str(message) not in seen:
            seen.add(str(message))
            console.print(Text(f"Warning: {message}", style="yellow"))

    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.simplefilter("default", RuntimeWarning)
        if os.environ.get(DEBUG_VARIABLE) != "1":
            transformers.logging.set_verbosity_error()
            for category in NOT_FOR_USERS:
                warnings.simplefilter("ignore", category)
        warnings.showwarning = show
        try:
            yield
        finally:
            transformers.logging.set_verbosity(verbosity)


class ProgressReporter(Reporter):
    """A progress bar on a terminal, plain lines elsewhere. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._load: TaskID | None = None
        self._train: TaskID | None = None
        self._num_steps = 1
        self._h2d_bytes = 0
        self._stalled_seconds = 0.0

    def __enter__(self) -> ProgressReporter:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._console.print(Text(line))

    def on_load(self, done: int, total: int) -> None:
        """See `Reporter.on_load`."""
        if self._load is None:
            self._load = self._progress.add_task("blocks", total=total, facts="quantizing")
        self._progress.update(self._load, completed=done)
        if done == total:
            self._progress.update(self._load, visible=False)

    def on_start(self, event: StartEvent) -> None:
        """See `Reporter.on_start`."""
        for note in event.notes:
            self.say(f"Note: {note}")
        record = event.record
        self.say(f"Plan: {plan_sentence(record['plan'], record['num_blocks'])}")
        device, host = (
            sum(record["predicted_device_bytes"].values()),
            sum(record["predicted_host_bytes"].values()),
        )
        predicted = predicted_sentence(device, host, record["predicted_step"], record["binding"])
        self.say(f"Predicted for the largest step: {predicted}")
        bought = bought_sentence(record["predicted_step"]["seconds"], record["seconds_with_one_more_gb"])
        self.say(f"One more GB of device memory would buy {bought}")
        self._num_steps = event.num_steps
        begin = "starting" if event.first_step == 0 else f"resuming after step {event.first_step}"
        self.say(f"{event.record['device']}, {event.num_steps} steps, {begin}")
        self._train = self._progress.add_task(
            "steps", total=event.num_steps, completed=event.first_step, facts=""
        )

    def on_warm_up(self, event: WarmUpEvent) -> None:
        """See `Reporter.on_warm_up`."""
        peak = event.peak_device_bytes
        memory = "" if peak is None else f", peak device memory {format_gb(peak)}"
        self.say(
            f"Warm-up with the largest step: {event.tokens} tokens, rows of up to {event.longest}, "
            f"{event.seconds:.1f} s{memory}"
        )

    def on_step(self, event: StepEvent) -> None:
        """See `Reporter.on_step`."""
        self._h2d_bytes += event.h2d_bytes
        self._stalled_seconds += event.exposed_copy_seconds
        facts = (
            f"loss {event.loss:.4f}  {event.tokens_per_second:.0f} tokens/s  "
            f"moved {format_bytes(self._h2d_bytes)}  stalled {self._stalled_seconds:.1f} s"
        )
        if self._train is not None:
            self._progress.update(self._train, completed=event.step, facts=facts)
        stride = max(1, self._num_steps // MAX_PLAIN_LINES)
        wanted = event.step == 1 or event.step % stride == 0 or event.step == self._num_steps
        if not self._console.is_terminal and wanted:
            self.say(f"step {event.step}/{self._num_steps}  {facts}")

    def on_eval(self, event: EvalEvent) -> None:
        """See `Reporter.on_eval`."""
        self.say(
            f"step {event.step}: held-out loss {event.eval_loss:.4f}{_perplexity(event.eval_perplexity)} "
            f"({event.eval_supervised_tokens} supervised tokens)"
        )

    def on_sample(self, event: SampleEvent) -> None:
        """See `Reporter.on_sample`."""
        shown = " ".join(event.text.split())
        cut = shown if len(shown) <= MAX_SAMPLE_CHARACTERS else f"{shown[:MAX_SAMPLE_CHARACTERS]} ..."
        self.say(f"step {event.step}: sample {event.index + 1}: {cut}")

    def on_checkpoint(self, event: CheckpointEvent) -> None:
        """See `Reporter.on_checkpoint`."""
        self.say(f"step {event.step}: checkpoint {event.path}")


def show_summary(console: Console, result: RunResult) -> None:
    """Print how a run ended."""
    if result.interrupted:
        console.print(
            Text(f"Interrupted after step {result.steps}; saved {result.checkpoint}. Go on with `--resume`.")
        )
        return
    facts = [f"{result.steps} steps"]
    if result.first_loss is not None and result.last_loss is not None:
        facts.append(f"loss {result.first_loss:.4f} -> {result.last_loss:.4f}")
    if result.eval_loss is not None:
        facts.append(f"held-out loss {result.eval_loss:.4f}{_perplexity(result.eval_perplexity)}")
    ended = "Stopped early, held-out loss no longer improves" if result.stopped_early else "Done"
    console.print(Text(f"{ended}: {', '.join(facts)}", style="bold green"))
    if result.best_step is not None and result.best_eval_loss is not None:
        best = f"Best evaluation: held-out loss {result.best_eval_loss:.4f} after step {result.best_step}"
        console.print(Text(f"{best}; the adapter is the one after step {result.adapter_step}"))
    if result.seconds:
        console.print(
            Text(
                f"{result.supervised_tokens} supervised of {result.tokens} tokens (padding included) in "
                f"{result.seconds:.1f} s, {result.tokens / result.seconds:.0f} tokens/s; moved "
                f"{format_bytes(result.h2d_bytes)} to the device, stalled {result.exposed_copy_seconds:.2f} s"
            )
        )
    for line in _against_prediction(result):
        console.print(Text(line))
    report = result.adapter_report
    if report is not None:
        console.print(
            Text(
                f"Adapter: {result.adapter} ({report.num_tensors} tensors of {report.num_modules} modules, "
                f"{format_bytes(report.num_bytes)}; stock PEFT reads it with 0 missing and 0 unexpected keys "
                f"onto {report.base_class}, blocks at `{report.blocks}`)"
            )
        )


def _perplexity(value: float | None) -> str:
    return "" if value is None else f", perplexity {value:.4g}"


def _against_prediction(result: RunResult) -> list[str]:
    """Return what was predicted beside what was measured."""
    device, host = result.predicted_device_bytes, result.predicted_host_bytes
    grown = (
        f"host memory predicted {{}}, measured {format_gb(result.grown_host_bytes)} more than before loading"
    )
    lines = []
    if result.peak_device_bytes is None:  # on the CPU both are host memory
        lines.append(f"Peak {grown.format(format_gb(device + host))}")
    else:
        lines.append(
            f"Peak device memory predicted {format_gb(device)}, measured {format_gb(result.peak_device_bytes)}; "
            + grown.format(format_gb(host))
        )
    if result.step_seconds is not None:
        lines.append(
            f"Largest steps predicted {result.predicted_step_seconds:.3g} s, measured {result.step_seconds:.3g} s"
        )
    return lines
