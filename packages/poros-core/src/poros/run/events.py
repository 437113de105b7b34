"""What a run tells while it goes on. A reporter is any object with these methods; none of them may change the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poros.checkpoint import AdapterReport

__all__ = [
    "CheckpointEvent",
    "EvalEvent",
    "Reporter",
    "RunResult",
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
    """The held-out rows were evaluated after ``step`` steps; ``eval_loss`` is per supervised token."""

    step: int
    eval_loss: float
    eval_supervised_tokens: int
    eval_seconds: float


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
        adapter: folder of the final adapter in PEFT's format; None after an interruption.
        adapter_report: what stock PEFT read back from it.
        checkpoint: the newest checkpoint.
        first_loss, last_loss: of the first and last step of this process; None without a step.
        eval_loss: of the last evaluation; None without held-out rows.
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
    adapter: Path | None
    adapter_report: AdapterReport | None
    checkpoint: Path | None
    first_loss: float | None
    last_loss: float | None
    eval_loss: float | None
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
    """Receives events; every method does nothing until a subclass says otherwise."""

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

    def on_checkpoint(self, event: CheckpointEvent) -> None:
        """After every saved checkpoint."""

    def on_end(self, result: RunResult) -> None:
        """After the last save; not called when the run fails."""
