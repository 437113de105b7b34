"""Host facts: memory limits, page-locking limit, container, WSL. Paths are arguments, so that tests can fake them."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil

__all__ = ["cgroup_memory", "host_facts", "in_container", "in_wsl", "memlock_limit_bytes"]

# cgroup v1 has no "none": an absent limit is the largest page-aligned 64-bit number.
CGROUP_V1_UNLIMITED_BYTES = 2**60
WSL_SPILL_HINT = (
    "The Windows driver may move GPU memory into system RAM instead of failing: set `CUDA - Sysmem Fallback Policy` to "
    "`Prefer No Sysmem Fallback` in the NVIDIA control panel."
)


def host_facts(root: Path = Path("/")) -> dict[str, Any]:
    """Return what limits host memory here.

    Args:
        root: root of the file system to read ``/proc``, ``/sys`` and marker files from.
    """
    limit, used = cgroup_memory(root)
    memory = psutil.virtual_memory()
    available = memory.available if limit is None else min(memory.available, max(limit - (used or 0), 0))
    return {
        "platform": platform.platform(),
        "cpu_count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "wsl": in_wsl(),
        "container": in_container(root),
        "ram_total_bytes": memory.total,
        "ram_available_bytes": memory.available,
        "cgroup_limit_bytes": limit,
        "cgroup_used_bytes": used,
        "usable_bytes": available,
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


def cgroup_memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """Return (limit, use) in bytes of the tightest memory cgroup above this process; None where there is none.

    A limit may sit on any ancestor: systemd puts it on the scope, Docker on the container's own root.
    """
    tightest: tuple[int | None, int | None] = (None, None)
    for folder, limit_name, use_name in _cgroup_folders(root):
        limit = _number(folder / limit_name)
        if limit is None or limit >= CGROUP_V1_UNLIMITED_BYTES:
            continue
        if tightest[0] is None or limit < tightest[0]:
            tightest = (limit, _number(folder / use_name))
    return tightest


def memlock_limit_bytes() -> int | None:
    """Return the soft limit of `ulimit -l` in bytes; None is unlimited or unknown (no such limit on Windows)."""
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _cgroup_folders(root: Path) -> list[tuple[Path, str, str]]:
    folders = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = (
                root / "sys/fs/cgroup/memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            )
        else:
            continue
        folder = base / group.lstrip("/")
        while True:
            folders.append((folder, *names))
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent
    return folders


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
