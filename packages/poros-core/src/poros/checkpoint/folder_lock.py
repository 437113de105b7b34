"""Advisory locks on folders: who writes to one keeps others out, and a killed process leaves no lock behind."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from poros.errors import OutputError, explain

__all__ = ["abandoned", "folder_lock", "holding_output", "refuse_used_folder"]

# What `flock` says where somebody else holds the lock; anything else means that there are no locks here.
HELD = (errno.EWOULDBLOCK, errno.EACCES)

Result = TypeVar("Result")


class _HasOutput(Protocol):
    output: Path


Runner = TypeVar("Runner", bound=_HasOutput)


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[bool | None]:
    """Hold the lock of an existing folder while inside, if it is free.

    The lock is the system's and lies on the folder itself, so that no file is left over, whatever ends the process.

    Yields:
        True: it is held now; False: somebody else holds it; None: this system or file system has no such locks.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield None
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        yield None
        return
    try:
        locked: bool | None = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            locked = False if error.errno in HELD else None
        yield locked
    finally:
        os.close(descriptor)


def abandoned(folder: Path) -> bool:
    """Return whether a folder that is locked while it is filled is known to have lost whoever filled it."""
    with folder_lock(folder) as locked:
        return locked is True


def refuse_used_folder(folder: Path) -> None:
    """Refuse an output folder that a run is using.

    Raises:
        OutputError: somebody holds its lock.
    """
    with folder_lock(folder) as locked:
        if locked is False:
            raise _used(folder)


def holding_output(run: Callable[[Runner], Result]) -> Callable[[Runner], Result]:
    """Let a method hold the lock of its object's output folder while it runs: two runs would mix their files.

    Raises:
        OutputError: somebody holds it.
    """

    @functools.wraps(run)
    def locked_run(runner: Runner) -> Result:
        with folder_lock(runner.output) as locked:
            if locked is False:
                raise _used(runner.output)
            return run(runner)

    return locked_run


def _used(folder: Path) -> OutputError:
    return OutputError(
        explain(
            "The output folder is in use",
            expected="a folder that no run is writing to",
            got="one that a running process has locked",
            where=str(folder),
            next_step="Wait for that run, end it, or name another `--output`",
        )
    )
