"""A file of JSON lines that a run appends to and a resumed run continues."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from poros.checkpoint import atomic_write_bytes
from poros.errors import OutputError

__all__ = ["LinesFile"]


class LinesFile:
    """Each line is with the operating system before the next step begins, whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def open(self, step: int) -> None:
        """Open the file behind the lines of steps up to ``step``.

        A resumed run first drops the lines of steps that it is going to repeat, and a last line that a killed process
        left unfinished.

        Raises:
            OutputError: the disk is full or refuses the write.
        """
        self.close()
        atomic_write_bytes(self.path, b"".join(_lines_up_to(self.path, step)))
        try:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise self._explained(error) from error

    def append(self, value: dict[str, Any]) -> None:
        """Write one line; nothing where the file is not open: what is done by hand, outside of a run.

        Raises:
            OutputError: the disk is full or refuses the write; no part of the line is left.
        """
        if self._descriptor is None:
            return
        line = json.dumps(value, allow_nan=False).encode() + b"\n"
        before = os.fstat(self._descriptor).st_size
        try:
            left = memoryview(line)
            while left:  # a full disk may take a part
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            os.ftruncate(self._descriptor, before)
            raise self._explained(error) from error

    def close(self) -> None:
        """Close the file, also after a failure."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _explained(self, error: OSError) -> OutputError:
        return OutputError(
            f"Cannot write {self.path}: {error.strerror or error}. What was written before and the checkpoints are "
            "intact: free some disk space and go on with `--resume`."
        )


def _lines_up_to(path: Path, step: int) -> list[bytes]:
    """Return the complete lines of steps up to ``step``."""
    if step == 0 or not path.exists():
        return []
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            complete = line.endswith(b"\n") and json.loads(line)["step"] <= step
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if complete:
            kept.append(line)
    return kept
