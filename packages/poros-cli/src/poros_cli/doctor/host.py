"""Host facts: memory limits, page-locking limit, container, WSL. Paths are arguments, so that tests can fake them."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil

from poros.run.control_group import control_group_memory
from poros.run.memory import available_host_bytes

__all__ = ["host_facts", "in_container", "in_wsl", "memlock_limit_bytes"]

WSL_SPILL_HINT = (
    "The Windows driver may move GPU memory into system RAM instead of failing: set `CUDA - Sysmem Fallback Policy` to "
    "`Prefer No Sysmem Fallback` in the NVIDIA control panel."
)


def host_facts(root: Path = Path("/")) -> dict[str, Any]:
    """Return what limits host memory here.

    Args:
        root: root of the file system to read ``/proc``, ``/sys`` and marker files from.
    """
    limit, used = control_group_memory(root)
    memory = psutil.virtual_memory()
    return {
        "platform": platform.platform(),
        "cpu_count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "wsl": in_wsl(),
        "container": in_container(root),
        "ram_total_bytes": memory.total,
        "ram_available_bytes": memory.available,
        "cgroup_limit_bytes": limit,
        "cgroup_used_bytes": used,
        "usable_bytes": available_host_bytes(root)[0],
        "memlock_limit_bytes": memlock_limit_bytes(),
    }


def in_wsl(release: str | None = None) -> bool:
    """Return whether this kernel is WSL's."""
    return "microsoft" in (platform.release() if release is None else release).lower()


def in_container(root: Path = Path("/")) -> str | None:
    """Return the kind of container that this process runs in, or None where nothing says so."""
    for marker, kind in ((".dockerenv", "docker"), ("run/.containerenv", "podman")):
        if (root / marker).exists():
            return kind
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    groups = _read(root / "proc/1/cgroup") or ""
    for word in ("kubepods", "docker", "containerd", "lxc"):
        if word in groups:
            return word
    return None


def memlock_limit_bytes() -> int | None:
    """Return the soft limit of `ulimit -l` in bytes; None is unlimited or unknown (no such limit on Windows)."""
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
