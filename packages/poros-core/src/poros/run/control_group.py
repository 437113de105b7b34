"""The memory limit of the control groups around this process, which the kernel's killer enforces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["control_group_memory"]

VERSION_2 = ("memory.max", "memory.current", "inactive_file")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
MOUNTS = ((2, "sys/fs/cgroup", VERSION_2), (1, "sys/fs/cgroup/memory", VERSION_1))
# Version 1 has no word for "none": an absent limit is the largest page-aligned 64-bit number.
UNLIMITED_BYTES = 2**60


def control_group_memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """Return (limit, use) in bytes of the group that leaves least room; (None, None) where there is no limit.

    A limit may sit on any ancestor: systemd puts it on the scope, Docker on the root that the container sees. Pages of
    files that nobody has used lately count as use but are given back before anything is killed, so they do not here.

    Args:
        root: of the file system with ``proc`` and ``sys``.
    """
    limits = []
    for folder, (limit_name, use_name, cached_name) in _groups(root):
        limit = _number(folder / limit_name)
        if limit is not None and limit < UNLIMITED_BYTES:
            use = _number(folder / use_name)
            cached = _statistic(folder / "memory.stat", cached_name)
            limits.append((limit, None if use is None else max(0, use - cached)))
    return min(limits, key=lambda found: found[0] - (found[1] or 0), default=(None, None))


def _groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the folder and file names of every group around this process, inside out, for both versions."""
    own = _own_groups(root)
    for version, mount, names in MOUNTS:
        base = root / mount
        folder = base / own.get(version, "")
        while folder != base and base in folder.parents:
            yield folder, names
            folder = folder.parent
        yield base, names


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


def _statistic(path: Path, name: str) -> int:
    """Return one line of a ``memory.stat``; 0 where it does not have it."""
    found = (line.split() for line in _read(path).splitlines())
    return next((int(words[1]) for words in found if len(words) == 2 and words[0] == name), 0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # another version, another system, or not ours to read
        return ""
