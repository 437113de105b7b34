"""What a run tells while it goes on, and who is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from poros.checkpoint import AdapterReport

__all__ = [
    "CheckpointEvent",
    "EvalEvent",
    "Reporter",
    "RunResult",
    "SampleEvent",
    "StartEvent",
    "StepEvent",
    "WarmUpEvent",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class StartEvent:
    """The run is ready for its first step.

    Attributes:
        first_step: optimizer steps that are already done (above 0 after a resume).
        num_steps: optimizer steps of the whole run.
        record: what ``run.json`` holds: settings, versions, device, fingerprint.
        notes: sentences that the user should see.
    """

    first_step: int
    num_steps: int
    record: Mapping[str, Any]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmUpEvent:
    """The largest step ran twice, and its results were thrown away.

    Attributes:
        tokens: positions that went through the blocks, padding included.
        longest: tokens per row of its widest micro-batch.
        seconds: wall time; captures of graphs and first allocations are in it.
        peak_device_bytes: see `StepEvent`.
    """

    tokens: int
    longest: int
    seconds: float
    peak_device_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent:
    """One optimizer step is done.

    Attributes:
        step: how many are done, this one included.
        loss: mean cross-entropy over the step's supervised tokens.
        learning_rate: that this step used.
        grad_norm: before clipping.
        tokens: positions that went through the blocks, padding included.
        supervised_tokens: the denominator of ``loss``.
        seconds: wall time of the step.
        tokens_per_second: ``tokens / seconds``.
        h2d_bytes: block bytes that were copied to the device.
        exposed_copy_seconds: time that compute waited for copies.
        peak_device_bytes: most device memory that the whole process held so far: its context and the highest
            reservation; None on the CPU.
        grown_host_bytes: resident size of this process after the step, less what it was when the trainer was made.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    supervised_tokens: int
    seconds: float
    tokens_per_second: float
    h2d_bytes: int
    exposed_copy_seconds: float
    peak_device_bytes: int | None
    grown_host_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalEvent:
    """The held-out rows were evaluated.

    Attributes:
        step: how many optimizer steps are done.
        eval_loss: mean cross-entropy per supervised token, over all held-out rows together.
        eval_perplexity: ``exp(eval_loss)``; None where that is no number.
        eval_supervised_tokens: the denominator of ``eval_loss``.
        eval_seconds: wall time.
    """

    step: int
    eval_loss: float
    eval_perplexity: float | None
    eval_supervised_tokens: int
    eval_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleEvent:
    """A sample prompt was answered.

    Attributes:
        step: how many optimizer steps are done.
        index: of the prompt.
        prompt: as the user wrote it.
        text: the answer.
        tokens: how many were generated.
        ended: the answer ended by itself; otherwise it was cut at the limit.
        seconds: wall time.
    """

    step: int
    index: int
    prompt: str
    text: str
    tokens: int
    ended: bool
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointEvent:
    """A checkpoint of ``step`` steps is complete on the disk."""

    step: int
    path: Path
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How a run ended.

    Attributes:
        steps: optimizer steps that are done in all.
        interrupted: a signal ended the run early, after a clean save.
        stopped_early: held-out loss no longer improved, which ended the run as `early_stop_patience` says.
        adapter: folder of the final adapter in PEFT's format; None after an interruption.
        adapter_step: after how many steps the adapter was what is saved there: the best evaluation's with
            ``keep_best``, else the last.
        adapter_report: what stock PEFT read back from it.
        checkpoint: the newest checkpoint.
        first_loss, last_loss: of the first and last step of this process; None without a step.
        eval_loss, eval_perplexity: of the last evaluation; None without held-out rows.
        best_step, best_eval_loss: of the evaluation with the lowest loss; None without one.
        tokens, supervised_tokens, seconds, h2d_bytes, exposed_copy_seconds: sums over the steps of this process.
        peak_device_bytes: see `StepEvent`.
        peak_host_bytes: highest resident size of this process.
        grown_host_bytes: of that, what was added since the trainer was made; compare it with ``predicted_host_bytes``.
        step_seconds: median time of the largest steps; compare it with ``predicted_step_seconds``.
        predicted_device_bytes, predicted_host_bytes, predicted_step_seconds: what the planner said; on the CPU device
            terms are host memory.
    """

    steps: int
    interrupted: bool
    stopped_early: bool
    adapter: Path | None
    adapter_step: int | None
    adapter_report: AdapterReport | None
    checkpoint: Path | None
    first_loss: float | None
    last_loss: float | None
    eval_loss: float | None
    eval_perplexity: float | None
    best_step: int | None
    best_eval_loss: float | None
    tokens: int
    supervised_tokens: int
    seconds: float
    h2d_bytes: int
    exposed_copy_seconds: float
    peak_device_bytes: int | None
    peak_host_bytes: int
    grown_host_bytes: int
    step_seconds: float | None
    predicted_device_bytes: int
    predicted_host_bytes: int
    predicted_step_seconds: float


class Reporter:
    """Receives events; every method does nothing until a subclass says otherwise.

    Methods are called one after the other on the thread that trains, which waits for them. An exception that one of
    them raises never ends the run: it is said once, and after a few the reporter is no longer called.

    A class that a plugin registers is made with the run's output folder as its only argument, once everything that the
    user typed is known to be well-formed and before anything is loaded. Whatever it needs is asked for there: a
    `PorosError` reaches the user as it is. The folder may not be written to before `on_start`.

    Attributes:
        name: what ``report_to`` names; only of registered classes.
        owned: entries of the output folder that it writes, and that ``overwrite`` removes.
    """

    name: ClassVar[str] = ""
    owned: ClassVar[tuple[str, ...]] = ()

    def on_load(self, done: int, total: int) -> None:
        """``done`` of ``total`` blocks are in the store."""

    def on_start(self, event: StartEvent) -> None:
        """Before the first step."""

    def on_warm_up(self, event: WarmUpEvent) -> None:
        """After the warm-up, if there is one."""

    def on_step(self, event: StepEvent) -> None:
        """After every optimizer step."""

    def on_eval(self, event: EvalEvent) -> None:
        """After every evaluation."""

    def on_sample(self, event: SampleEvent) -> None:
        """After every answer to a sample prompt."""

    def on_checkpoint(self, event: CheckpointEvent) -> None:
        """After every saved checkpoint."""

    def on_end(self, result: RunResult) -> None:
        """After the last save; not called when the run fails."""

    def on_close(self) -> None:
        """When the trainer is closed, after a failure too: give back what is still held."""
