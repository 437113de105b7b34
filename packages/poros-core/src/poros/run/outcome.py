"""What a run came to: the memory that it took, and its result beside what was predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import torch

from poros.planning.planner import PlannedRun
from poros.run.evaluating import perplexity
from poros.run.events import RunResult
from poros.run.memory import context_bytes
from poros.run.record import peak_host_bytes
from poros.run.selection import Selection
from poros.run.totals import Totals

__all__ = ["MemoryUse", "make_result"]


class MemoryUse:
    """The memory of this process from the moment on at which this is made, before weights are loaded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host_bytes_before = int(psutil.Process().memory_info().rss)
        self._context_bytes = 0
        if device.type == "cuda":
            # Never again: memory that captured graphs hold counts as reserved only.
            torch.cuda.reset_peak_memory_stats(device)

    def measure_context(self) -> None:
        """Once graphs are captured and modules loaded, look at what the process holds besides its allocator."""
        if self._device.type == "cuda":
            self._context_bytes = context_bytes(self._device)

    def peak_device_bytes(self) -> int | None:
        """Return context and highest reservation, which is what the card had to have; None on the CPU."""
        if self._device.type != "cuda":
            return None
        return self._context_bytes + torch.cuda.max_memory_reserved(self._device)

    def grown_host_bytes(self) -> int:
        """Return by how much the process is larger now."""
        return max(0, int(psutil.Process().memory_info().rss) - self._host_bytes_before)

    def peak_grown_host_bytes(self) -> int:
        """Return by how much the process was larger at its peak."""
        return max(0, peak_host_bytes() - self._host_bytes_before)


def make_result(
    done: int,
    *,
    interrupted: bool,
    totals: Totals,
    chosen: Selection,
    memory: MemoryUse,
    planned: PlannedRun,
    checkpoint: Path | None,
    **made: Any,
) -> RunResult:
    """Return how a run ended.

    Args:
        done: optimizer steps.
        interrupted: it ended before its last step, by a signal or `Trainer.request_stop`.
        totals, chosen: sums over the steps, and what the evaluations chose.
        memory, planned: what was measured, and what was predicted.
        checkpoint: the newest.
        made: of a run that is finished, the fields about its adapter and whether it stopped early.
    """
    return RunResult(
        steps=done,
        interrupted=interrupted,
        stopped_early=made.get("stopped_early", False),
        adapter=made.get("adapter"),
        adapter_step=made.get("adapter_step"),
        adapter_report=made.get("adapter_report"),
        checkpoint=checkpoint,
        first_loss=totals.first_loss,
        last_loss=totals.last_loss,
        eval_loss=chosen.last_loss,
        eval_perplexity=None if chosen.last_loss is None else perplexity(chosen.last_loss),
        best_step=chosen.best_step,
        best_eval_loss=chosen.best_loss,
        tokens=totals.tokens,
        supervised_tokens=totals.supervised_tokens,
        seconds=totals.seconds,
        h2d_bytes=totals.h2d_bytes,
        exposed_copy_seconds=totals.exposed_copy_seconds,
        peak_device_bytes=memory.peak_device_bytes(),
        peak_host_bytes=peak_host_bytes(),
        grown_host_bytes=memory.peak_grown_host_bytes(),
        step_seconds=totals.median_seconds(),
        predicted_device_bytes=planned.prediction.device_bytes,
        predicted_host_bytes=planned.prediction.host_bytes,
        predicted_step_seconds=planned.time.seconds,
    )
