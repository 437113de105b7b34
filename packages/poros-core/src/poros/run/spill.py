"""Drivers that move device memory to host memory instead of refusing it: the run goes on, many times slower."""

from __future__ import annotations

import platform
import statistics
from collections import deque
from collections.abc import Callable

import torch

from poros.run.events import Reporter, StepEvent
from poros.units import format_gb

__all__ = ["SpillWatch", "driver_spills", "spill_watches"]

# Under this the card counts as full: such a driver moves memory before nothing is left.
LITTLE_BYTES = 200 * 10**6
# A step that takes so many times longer than is usual for its tokens is no matter of chance.
SLOWER = 3.0
# How many steps tell what is usual, and how many are needed for that.
NUM_REMEMBERED, NUM_NEEDED = 64, 5


def driver_spills(system: str | None = None, release: str | None = None) -> bool:
    """Return whether this system's NVIDIA driver spills: Windows, and Linux inside it."""
    system = platform.system() if system is None else system
    return system == "Windows" or "microsoft" in (platform.release() if release is None else release).lower()


def spill_watches(device: torch.device, say: Callable[[str], None]) -> list[SpillWatch]:
    """Return the watch of a run, or none where the driver refuses what does not fit."""
    if device.type != "cuda" or not driver_spills():
        return []
    return [SpillWatch(lambda: torch.cuda.mem_get_info(device)[0], say)]


class SpillWatch(Reporter):
    """Says once that device memory seems to have been moved to the host.

    Args:
        free_bytes: returns how much device memory is free.
        say: takes the sentence.
    """

    def __init__(self, free_bytes: Callable[[], int], say: Callable[[str], None]) -> None:
        self._free_bytes, self._say = free_bytes, say
        self._usual: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._said = False

    def on_step(self, event: StepEvent) -> None:
        """Compare the step's time per token with what was usual so far."""
        seconds = event.seconds / event.tokens
        usual = statistics.median(self._usual) if len(self._usual) >= NUM_NEEDED else None
        self._usual.append(seconds)
        if self._said or usual is None or seconds <= SLOWER * usual:
            return
        free = self._free_bytes()
        if free < LITTLE_BYTES:
            self._said = True
            self._say(
                f"Step {event.step} took {event.seconds:.3g} s where {usual * event.tokens:.3g} s are usual, and "
                f"{format_gb(free)} of device memory are free: this driver moves device memory to the host instead of "
                "refusing it. Close other programs on the GPU, lower `vram` or `micro_batch_size`, or set `CUDA - "
                "Sysmem Fallback Policy` to `Prefer No Sysmem Fallback` in the NVIDIA control panel."
            )
