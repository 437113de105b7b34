"""The memory limit of the control groups around this process, which the kernel's killer enforces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["control_group_memory"]

VERSION_2 = ("sys/fs/cgroup", "memory.max", "memory.current")
VERSION_1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
# Version 1 has no word for "none": an absent limit is the largest page-aligned 64-bit number.
UNLIMITED_BYTES = 2**60


def control_group_memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """Return (limit, use) in bytes of the group that leaves least room; (None, None) where there is no limit.

    A limit may sit on any ancestor: systemd puts it on the scope, Docker on the root that the container sees.

    Args:
        root: of the file system with ``proc`` and ``sys``.
    """
    limits = []
    for folder, limit_name, use_name in _groups(root):
        limit = _number(folder / limit_name)
        if limit is not None and limit < UNLIMITED_BYTES:
            limits.append((limit, _number(folder / use_name)))
    return min(limits, key=lambda found: found[0] - (found[1] or 0), default=(None, None))


def _groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield the folder and file names of every group around this process, inside out, for both versions."""
    own = _own_groups(root)
    for version, (mount, limit_name, use_name) in ((2, VERSION_2), (1, VERSION_1)):
        base = root / mount
        folder = base / own.get(version, "")
        while folder != base and base in folder.parents:
            yield folder, limit_name, use_name
            folder = folder.parent
        yield base, limit_name, use_name


def _own_groups(root: Path) -> dict[int, str]:
    groups = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            groups[2] = group.strip("/")
        elif "memory" in controllers.split(","):
            groups[1] = group.strip("/")
    return groups


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # another version, another system, or not ours to read
        return ""
