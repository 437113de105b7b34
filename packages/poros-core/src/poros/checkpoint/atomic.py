"""Writing so that a reader finds the old content or the new one, never a part.

New content goes to a temporary sibling, reaches the disk (fsync), and takes its place by a rename.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from poros.checkpoint.folder_lock import abandoned, folder_lock
from poros.checkpoint.manifest import write_manifest
from poros.errors import OutputError, explain

__all__ = [
    "atomic_folder",
    "atomic_write_bytes",
    "atomic_write_json",
    "explaining_writes",
    "remove_folder",
    "restore_interrupted",
    "sweep_abandoned",
    "sweep_leftovers",
]

# What lies beside `name`: `.name.tmp-<random>` is being filled, `.name.old-<random>` is being replaced and
# `.name.gone-<random>` is being removed.
TEMPORARY, OLD, GONE = ".tmp-", ".old-", ".gone-"
# A folder is locked a moment after it is made.
GRACE_SECONDS = 10.0


@contextmanager
def atomic_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty folder to fill; on success it becomes ``target`` with a manifest, on failure it vanishes.

    When an existing folder is replaced, it is moved aside first and removed last. A process that is killed between
    the two renames leaves it there: `restore_interrupted`, which also runs here, puts it back.

    Args:
        target: where the folder will appear; its parent is created if needed.
        overwrite: replace an existing ``target``.

    Raises:
        OutputError: ``target`` exists and ``overwrite`` is false, or the disk is full or refuses the write.
    """
    with explaining_writes(target):
        restore_interrupted(target.parent)
    if os.path.lexists(target) and not overwrite:
        raise OutputError(
            explain("Cannot save", expected="a new folder", got="one that exists", where=str(target))
        )
    temporary = _sibling(target, TEMPORARY)
    with explaining_writes(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        try:
            with folder_lock(temporary):  # says to `sweep_abandoned` that somebody is at work
                yield temporary
                write_manifest(temporary)
                for folder, _, file_names in os.walk(temporary, topdown=False):
                    for file_name in file_names:
                        _fsync(Path(folder) / file_name)
                    _fsync(Path(folder))
                _take_place(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Replace a file's content in one step.

    Raises:
        OutputError: the disk is full or refuses the write; the earlier content stays.
    """
    temporary = _sibling(path, TEMPORARY)
    with explaining_writes(path):
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _fsync(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def atomic_write_json(path: Path, value: Any) -> None:
    """Replace a JSON file's content in one step. NaN and infinity, which JSON lacks, are a ``ValueError``."""
    text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False)
    atomic_write_bytes(path, text.encode() + b"\n")


def remove_folder(folder: Path) -> None:
    """Remove a folder so that an interruption leaves no part of it under its own name."""
    gone = _sibling(folder, GONE)
    folder.rename(gone)
    _fsync(folder.parent)
    shutil.rmtree(gone)


def restore_interrupted(parent: Path) -> None:
    """Put back what a killed process had moved aside and not yet replaced."""
    for path in parent.glob(f".*{OLD}*"):
        target = parent / path.name[1:].rpartition(OLD)[0]
        if not os.path.lexists(target):
            path.rename(target)


def sweep_leftovers(parent: Path) -> None:
    """Remove what a killed process left in a folder that nobody else writes to."""
    restore_interrupted(parent)
    for path in parent.glob(".*"):
        if any(kind in path.name for kind in (TEMPORARY, OLD, GONE)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def sweep_abandoned(parent: Path) -> None:
    """Remove what killed processes left in a folder that others may be writing to, as far as that can be told.

    Never fails: a folder that cannot be read or written keeps what it has.
    """
    for path in parent.glob(f".*{TEMPORARY}*"):
        if _age_seconds(path) > GRACE_SECONDS and abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
    for path in (*parent.glob(f".*{OLD}*"), *parent.glob(f".*{GONE}*")):
        # What was moved aside is the only copy until its successor is there.
        if GONE in path.name or os.path.lexists(parent / path.name[1:].rpartition(OLD)[0]):
            shutil.rmtree(path, ignore_errors=True)


def _age_seconds(path: Path) -> float:
    """Return how long ago a folder was last changed; nothing that is gone or no folder is old."""
    try:
        return time.time() - path.stat().st_mtime if path.is_dir() else 0.0
    except OSError:
        return 0.0


def _take_place(temporary: Path, target: Path) -> None:
    if not os.path.lexists(target):
        temporary.rename(target)
        _fsync(target.parent)
        return
    old = _sibling(target, OLD)
    target.rename(old)
    try:
        temporary.rename(target)
    except BaseException:
        old.rename(target)
        raise
    _fsync(target.parent)
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old, ignore_errors=True)  # somebody else may be sweeping
    else:
        old.unlink()


def _sibling(path: Path, kind: str) -> Path:
    return path.parent / f".{path.name}{kind}{secrets.token_hex(4)}"


def _fsync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows has no fsync of folders
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def explaining_writes(target: Path) -> Iterator[None]:
    """Turn a failed write into a message that says what is left.

    Raises:
        OutputError: the disk is full or refuses the write.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG)
        free = "unknown"
        with contextlib.suppress(OSError):
            free = f"{shutil.disk_usage(target.parent).free} bytes free"
        raise OutputError(
            f"Cannot save {target}: {error.strerror or error} ({free}). Nothing half-written is left and what was "
            f"saved earlier is intact. {'Free some disk space' if full else 'Check the folder and its permissions'}."
        ) from error
