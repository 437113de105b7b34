"""Timing steps without stopping the host between them: that is how a training loop runs."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

__all__ = ["StepTimes", "time_steps"]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of whole optimizer steps.

    Attributes:
        step_seconds: the median of the timed steps.
        all_step_seconds: each timed step.
        warmup_seconds: each step before them, by the host's clock.
    """

    step_seconds: float
    all_step_seconds: tuple[float, ...]
    warmup_seconds: tuple[float, ...]

    def facts(self) -> dict[str, Any]:
        """Return the attributes as a mapping."""
        return asdict(self)


def time_steps(
    step: Callable[[int], None],
    device: torch.device,
    *,
    warmup_steps: int,
    steps: int,
    before_timing: Callable[[], None] | None = None,
) -> StepTimes:
    """Run ``warmup_steps`` and then ``steps`` steps and time the latter.

    On CUDA a step's time is the distance of two events at its ends on the compute stream: the host may run ahead, and
    where it does not, the wait counts.

    Args:
        step: runs the optimizer step of an index.
        before_timing: called once the device is idle after the warm-up, to reset counters.
    """
    warmup = []
    for index in range(warmup_steps):
        start = time.perf_counter()
        step(index)
        _synchronize(device)
        warmup.append(time.perf_counter() - start)
    if before_timing is not None:
        before_timing()
    marks = [_Mark(device)]
    for index in range(warmup_steps, warmup_steps + steps):
        step(index)
        marks.append(_Mark(device))
    _synchronize(device)
    seconds = tuple(before.seconds_to(after) for before, after in itertools.pairwise(marks))
    return StepTimes(statistics.median(seconds), seconds, tuple(warmup))


class _Mark:
    """A point in the work of a device: an event on CUDA, the clock on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._time = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def seconds_to(self, later: _Mark) -> float:
        """Return the distance to a later mark; on CUDA both must have happened."""
        if self._event is not None and later._event is not None:
            return self._event.elapsed_time(later._event) / 1000
        return later._time - self._time


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
