"""How much memory a run may take, asked before anything is loaded: a message beats the kernel's killer."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from poros.planning.device_terms import CONTEXT_BYTES
from poros.planning.request import Budget
from poros.run.control_group import control_group_memory
from poros.units import format_gb

__all__ = ["available_device_bytes", "available_host_bytes", "context_bytes", "resolve_budget"]

# More than any context of one process: whatever is beyond belongs to somebody else.
LARGEST_CONTEXT_BYTES = 2 * 10**9

# Left to the process itself where the kernel kills at the limit: modules, caches of libraries, a CUDA context. A tiny
# CPU run grew by up to 31 MB beyond what was planned (2-core x86-64 machine, torch 2.15, 2026-11-30).
PROCESS_RESERVE_BYTES = 256 * 10**6

# Of a thread where the shell's `ulimit -s` sets none; the usual value of it.
STACK_BYTES = 8 * 2**20


def available_host_bytes(root: Path = Path("/")) -> tuple[int, str]:
    """Return how much more host memory this process may take, and what limits it.

    The limit of the control group counts besides what the machine has free: a container sees the whole machine's
    memory and is killed at its own limit, so a reserve stays below it. The limits of the process
    (``ulimit -v``, ``ulimit -d``) count as well.
    """
    available, limit = psutil.virtual_memory().available, "free memory of this machine"
    allowed, used = control_group_memory(root)
    if allowed is not None and allowed - (used or 0) - PROCESS_RESERVE_BYTES < available:
        available = max(0, allowed - (used or 0) - PROCESS_RESERVE_BYTES)
        limit = "memory limit of this container or control group"
    for left, name in _process_limits():
        if left < available:
            available, limit = left, name
    return available, limit


def _process_limits() -> list[tuple[int, str]]:
    """Return what is left under every limit that the shell or a scheduler has set for this process.

    OpenMP's threads start at the first large operation, and where there is no room for the stack of one, it ends the
    process with a line of its own: their stacks are left out of what may be used.
    """
    try:
        import resource
    except ImportError:  # Windows
        return []
    used = psutil.Process().memory_info()
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    stacks = torch.get_num_threads() * (STACK_BYTES if stack == resource.RLIM_INFINITY else stack)
    limits = []
    for name, option, now in (("RLIMIT_AS", "-v", used.vms), ("RLIMIT_DATA", "-d", getattr(used, "data", 0))):
        limit = resource.getrlimit(getattr(resource, name))[0]
        if limit != resource.RLIM_INFINITY:
            limits.append((max(0, limit - now - stacks), f"memory limit of this process, `ulimit {option}`"))
    return limits


def available_device_bytes(device: torch.device) -> int:
    """Return how much of a GPU this whole process may take: what is free, and what the process holds already."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return free + reserved + min(CONTEXT_BYTES, total - free - reserved)


def context_bytes(device: torch.device) -> int:
    """Return what this process holds on a GPU besides its allocator: context, modules, captured graphs.

    Measured as everything that is used and not ours to allocate; where another process uses the card too, that cannot
    be told apart, and the assumed size of a context is returned.
    """
    free, total = torch.cuda.mem_get_info(device)
    used = total - free - torch.cuda.memory_reserved(device)
    return used if used <= LARGEST_CONTEXT_BYTES else CONTEXT_BYTES


def resolve_budget(
    device: torch.device, *, device_bytes: int | None, host_bytes: int | None
) -> tuple[Budget, tuple[str, ...]]:
    """Return the budget of a run on this machine, and a sentence for every budget that had to be cut.

    Args:
        device: of the run.
        device_bytes: what the user allows; None is what is free, of which the planner takes no more than pays.
        host_bytes: what the user allows; None is what is free.
    """
    notes = []
    free_host, host_limit = available_host_bytes()
    host = free_host
    if host_bytes is not None:
        host, host_limit = (
            min(host_bytes, free_host),
            "the `ram` budget" if host_bytes <= free_host else host_limit,
        )
        if host < host_bytes:
            notes.append(_clamped("ram", host_bytes, host, host_limit))
    allowed, limit = device_bytes, "no limit" if device_bytes is None else "the `vram` budget"
    if device.type == "cuda":
        free = available_device_bytes(device)
        if device_bytes is None or free < device_bytes:
            allowed, limit = free, f"free memory of {torch.cuda.get_device_name(device)}"
        if device_bytes is not None and free < device_bytes:
            notes.append(_clamped("vram", device_bytes, free, limit))
    budget = Budget(
        device_bytes=allowed,
        host_bytes=host,
        device_limit=limit,
        host_limit=host_limit,
        frugal=device_bytes is None,
    )
    return budget, tuple(notes)


def _clamped(name: str, asked: int, got: int, limit: str) -> str:
    return f"`{name}` is {format_gb(asked)}, more than there is: planned with {format_gb(got)} ({limit})."
