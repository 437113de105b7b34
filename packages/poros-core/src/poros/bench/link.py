"""The rate of the link between host and device memory."""

from __future__ import annotations

import time

import torch

from poros.blocks.host_memory import HostArena

__all__ = ["link_bytes_per_second"]

PROBE_BYTES = {"cuda": 1 << 28, "cpu": 1 << 24}  # about a block of a large model, of a small one
REPEATS = 4


def link_bytes_per_second(device: torch.device) -> float:
    """Return the rate of a page-locked host-to-device copy of a block's size; on the CPU that of a plain copy.

    The best of a few rounds: the link has one speed, everything slower is a disturbance.
    """
    num_bytes = PROBE_BYTES[device.type]
    arena = HostArena([num_bytes], pin=device.type == "cuda")
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    source = arena.region(0).fill_(1)
    seconds = []
    for _ in range(REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    arena.close()
    return num_bytes / min(seconds)
