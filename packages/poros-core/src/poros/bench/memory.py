"""What a process takes: the CUDA context and everything the allocator reserved, and host memory above the imports."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from poros.errors import BudgetError, explain

__all__ = ["MemoryMeter"]

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
# What joins the context after it was made: kernels and library handles load when they are first used. Measured on an
# H200 (torch 2.11, 2026-11-30): 0.65 GB at the start, 0.80 GB after the steps.
CONTEXT_GROWTH_BYTES = 150_000_000
RESET_PEAK = "5"  # see proc(5): the peak of the resident size starts again from now


class MemoryMeter:
    """Starts before a model is built; read it once, when everything has been measured.

    The peak statistics are reset here and never again. The context is what the device has in use beyond the
    allocator's share, so the device must be this process's alone.

    Args:
        device: of the run.
        limit_bytes: what the process may take of the device, context included; the allocator refuses the rest.

    Raises:
        BudgetError: the context alone is larger than the limit.
    """

    def __init__(self, device: torch.device, limit_bytes: int | None = None) -> None:
        self._device = device
        self._limit_bytes = limit_bytes
        with contextlib.suppress(OSError):
            CLEAR_REFS.write_text(RESET_PEAK)
        self._host_baseline_bytes = psutil.Process().memory_info().rss
        if device.type != "cuda":
            return
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        if limit_bytes is not None:
            self._limit(limit_bytes)

    def _limit(self, limit_bytes: int) -> None:
        context, total = self.context_bytes() + CONTEXT_GROWTH_BYTES, torch.cuda.mem_get_info(self._device)[1]
        if context >= limit_bytes:
            raise BudgetError(
                explain("The CUDA context does not fit", expected=f"at most {limit_bytes} bytes", got=context)
            )
        share = min(1.0, (limit_bytes - context) / total)
        torch.cuda.set_per_process_memory_fraction(share, self._device)

    def context_bytes(self) -> int:
        """Return the device memory in use that the allocator does not own: context, kernels, library handles."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device)

    def read(self) -> dict[str, Any]:
        """Return the peaks so far, in bytes."""
        facts: dict[str, Any] = {
            "memory_limit_bytes": self._limit_bytes,
            "host_baseline_bytes": self._host_baseline_bytes,
            "peak_host_bytes": max(0, _peak_host_bytes() - self._host_baseline_bytes),
        }
        if self._device.type == "cuda":
            context = self.context_bytes()
            reserved = torch.cuda.max_memory_reserved(self._device)
            facts |= {
                "context_bytes": context,
                "peak_reserved_bytes": reserved,
                "peak_allocated_bytes": torch.cuda.max_memory_allocated(self._device),
                "peak_device_bytes": context + reserved,
            }
        return facts


def _peak_host_bytes() -> int:
    """Return the highest resident size of this process image; `getrusage` would count the parent's before exec."""
    with contextlib.suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "linux":  # a sandbox may leave the line out
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(psutil.Process().memory_info().rss)
