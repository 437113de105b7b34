"""Durations. A clock may be set back while a run goes on (a suspended machine, a simulated clock): none is negative."""

from __future__ import annotations

import time

__all__ = ["Stopwatch", "per_second"]


class Stopwatch:
    """Measures from when it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since then; 0.0 where the clock went backwards."""
        return max(0.0, time.perf_counter() - self._start)


def per_second(count: float, seconds: float) -> float:
    """Return ``count / seconds``; 0.0, which no real rate is, where no time passed on the clock."""
    return count / seconds if seconds > 0 else 0.0
