"""A layer over Python's file calls that counts them and kills the process, or fills the disk, at the n-th one.

What counts is every call that changes something below the watched folders: a file opened for writing, a write, a
flush to the disk, a new folder, a rename, a removal. A write that is hit is done by half, as a real one may be.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Call", "FileFaults", "area_of", "cache_full", "disk_full", "kill"]

RANDOM_PART = re.compile(r"(\.(?:tmp|old|gone)-|\.rows-)\w+")
GROWING = ("open", "write", "mkdir")
Call = tuple[str, str]  # what was called, and on what, relative to the watched folder


def kill(number: int, call: Call) -> None:
    """End this process as the kernel does."""
    os.kill(os.getpid(), signal.SIGKILL)


def disk_full(number: int, call: Call) -> None:
    """Refuse whatever needs room."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def cache_full(number: int, call: Call) -> None:
    """The same where the cache has a file system of its own: nothing else is full."""
    disk_full(number, call)


def area_of(call: Call) -> str:
    """Return the part of a run that a call belongs to."""
    name, path = call
    if path.startswith("cache/rows"):
        return "rows cache"
    if path.startswith("cache"):
        return "store cache"
    if ".dry-save" in path:
        return "dry save"
    if "checkpoints" in path:
        return "pruning" if ".gone-" in path or name in ("unlink", "rmdir") else "save"
    return "final adapter" if "adapter" in path else "records"


class FileFaults:
    """Counts calls below ``folder``, and acts at one of them.

    Attributes:
        calls: what was counted so far.
    """

    def __init__(
        self,
        folder: Path,
        *,
        at: int | None,
        act: Callable[[int, Call], None],
        told: Callable[[int, Call], None] = lambda number, call: None,
    ) -> None:
        """Prepare; `install` begins.

        Args:
            folder: what is watched.
            at: number of the call, from 0, at which to act; None only counts.
            act: `kill`, `disk_full` or `cache_full`; with these later calls that need room fail as well.
            told: hears of it first.
        """
        self._folder, self._at, self._act, self._told = str(folder.resolve()), at, act, told
        self.calls: list[Call] = []
        self.full = False

    def install(self) -> None:
        """Replace the calls of this process for the rest of its life."""
        import poros.checkpoint.tensor_file as tensor_file

        for name in ("mkdir", "rmdir", "unlink", "remove", "rename", "replace", "fsync", "ftruncate"):
            setattr(os, name, self._counted(name, getattr(os, name)))
        os.write = self._counted_write(os.write)  # type: ignore[assignment]
        builtins.open = io.open = self._open  # type: ignore[assignment]
        # Its own writes happen outside of Python.
        tensor_file.save_file = self._save_tensors  # type: ignore[assignment]

    def reach(self, name: str, path: Any, directory: int | None = None) -> bool:
        """Count a call on ``path``; return whether it is the one to be hit and to be done by half."""
        place = self._place(path, directory)
        if place is None:
            return False
        call = ("unlink" if name == "remove" else "rename" if name == "replace" else name, place)
        number = len(self.calls)
        self.calls.append(call)
        full_here = self.full and (self._act is disk_full or place.startswith("cache"))
        hit = number == self._at or (full_here and call[0] in GROWING)
        if hit and self._act is not kill and call[0] not in GROWING:
            self._at = number + 1  # a removal needs no room: the next one that does is hit
            hit = False
        if not hit:
            return False
        if not self.full:
            self._told(number, call)
        self.full = self._act is not kill
        if name == "write":
            return True
        self._act(number, call)
        return False

    def act(self) -> None:
        """Do what is due after half a write."""
        self._act(len(self.calls) - 1, self.calls[-1])

    def _place(self, path: Any, directory: int | None) -> str | None:
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        text = os.fsdecode(path)
        if directory is not None and not os.path.isabs(text):
            text = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), text)
        text = os.path.abspath(text)
        if not text.startswith(self._folder):
            return None
        return RANDOM_PART.sub(r"\1", text[len(self._folder) + 1 :])

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **options: Any) -> Any:
            self.reach(name, path, options.get("dir_fd"))
            return original(path, *rest, **options)

        return call

    def _counted_write(self, original: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
        def write(descriptor: int, data: Any) -> int:
            if self.reach("write", descriptor):
                original(descriptor, memoryview(data)[: len(data) // 2])
                self.act()
            return original(descriptor, data)

        return write

    def _open(self, file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **options: Any) -> Any:
        if not set(mode) & set("wxa+") or (isinstance(file, int) and self._place(file, None) is None):
            return _REAL_OPEN(file, mode, buffering, *rest, **options)
        if isinstance(file, str | os.PathLike) and self._place(file, None) is None:
            return _REAL_OPEN(file, mode, buffering, *rest, **options)
        self.reach("open", file)
        raw = _Raw(
            file,
            mode.replace("b", "").replace("t", ""),
            options.pop("closefd", True),
            options.pop("opener", None),
        )
        raw.faults = self
        buffered = io.BufferedRandom if "+" in mode else io.BufferedWriter
        binary = raw if buffering == 0 else buffered(raw)
        if "b" in mode:
            return binary
        names = ("encoding", "errors", "newline")
        given = {**dict(zip(names, rest, strict=False)), **options}
        return io.TextIOWrapper(binary, **{name: given.get(name) for name in names})  # type: ignore[arg-type]

    def _save_tensors(self, tensors: Mapping[str, Any], path: Path, metadata: Any = None) -> None:
        from safetensors.torch import save

        content = save(dict(tensors), metadata)
        with self._open(path, "wb", 0) as file:
            for piece in _pieces(content):
                file.write(piece)


class _Raw(io.FileIO):
    """A file whose writes are counted."""

    faults: FileFaults

    def write(self, data: Any) -> int:
        """Write, or the half of it."""
        if self.faults.reach("write", self.fileno()):
            super().write(memoryview(data)[: len(memoryview(data)) // 2])
            self.faults.act()
        return super().write(data)


def _pieces(content: bytes) -> Sequence[bytes]:
    middle = len(content) // 2
    return (content[:middle], content[middle:])


_REAL_OPEN = io.open
