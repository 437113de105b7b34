"""Tokenized rows on disk, so that a second start neither renders nor tokenizes.

One file per key, written beside its place and renamed into it: two processes that make the same file make the same
bytes, and a reader sees a whole file or none. Its sha256 stands in its head; a file that does not match it is
replaced. A cache that cannot be written to costs a warning, never the run; what a killed process left half-written is
swept by the next one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import time
import warnings
from array import array
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from poros_data.errors import explain
from poros_data.report import DataReport
from poros_data.rows import Row

__all__ = ["RowCache"]

# Raised whenever the same files, template, tokenizer and settings make other rows, or the file's form changes.
FORM = 1
MAGIC = b"poros rows\n"
# Of a file that is being written.
PREFIX = ".rows-"
GRACE_SECONDS = 10.0


class RowCache:
    """A folder of tokenized data sets."""

    def __init__(self, folder: Path) -> None:
        """Use ``folder``; it is made at the first save."""
        self._folder = folder

    def path(self, key: str) -> Path:
        """Return the file of a key."""
        whole = json.dumps([key, FORM, version("poros-data"), sys.byteorder]).encode()
        return self._folder / f"rows-{hashlib.sha256(whole).hexdigest()[:32]}.bin"

    def load(self, key: str) -> tuple[list[Row], DataReport] | None:
        """Return the rows and report of a key; None where there are none, or (with a warning) a damaged file."""
        _sweep(self._folder)
        path = self.path(key)
        try:
            raw = path.read_bytes()
        except OSError:
            return None
        start = len(MAGIC) + hashlib.sha256().digest_size
        payload = memoryview(raw)[start:]
        if raw[: len(MAGIC)] != MAGIC or raw[len(MAGIC) : start] != hashlib.sha256(payload).digest():
            _warn_damaged(path)
            return None
        try:
            return _parse(payload)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
            _warn_damaged(path)  # whole, but not written by this class
            return None

    def save(self, key: str, rows: Sequence[Row], report: DataReport) -> None:
        """Write the rows and report of a key; where the folder cannot be written to, say so in a warning."""
        head = json.dumps(
            {
                "report": report.record(),
                "sizes": [len(row.input_ids) for row in rows],
                "lines": [row.line for row in rows],
                "files": [row.file for row in rows],
            }
        ).encode()
        numbers = array("i")
        for row in rows:
            numbers.extend(row.input_ids)
            numbers.extend(row.labels)
        payload = len(head).to_bytes(8, "little") + head + numbers.tobytes()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write(self.path(key), MAGIC + hashlib.sha256(payload).digest() + payload)
        except OSError as error:
            warnings.warn(
                explain(
                    "Cannot keep tokenized rows, so the next start makes them again",
                    expected="a folder that can be written to",
                    got=error.strerror or error,
                    where=str(self._folder),
                    next_step="Free some disk space, or name another `cache_dir`, or none",
                ),
                stacklevel=2,
            )

    def _write(self, path: Path, content: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=PREFIX, delete=False) as file:
            _lock(file.fileno())  # says to `_sweep` that somebody is at work
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
        os.replace(file.name, path)


def _sweep(folder: Path) -> None:
    """Remove half-written files whose writers are gone."""
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            # A file is locked a moment after it is made.
            if time.time() - path.stat().st_mtime > GRACE_SECONDS and _lock(file.fileno()):
                path.unlink()


def _lock(descriptor: int) -> bool:
    """Take the lock of an open file, which ends with it, and return whether it was there and free."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):  # Windows; somebody's; a file system without locks
        return False
    return True


def _warn_damaged(path: Path) -> None:
    warnings.warn(f"The tokenized rows in `{path}` are damaged and are made anew.", stacklevel=3)


def _parse(payload: memoryview) -> tuple[list[Row], DataReport]:
    """Return what a file holds behind its hash; any `ValueError` and the like where it was forged."""
    length = int.from_bytes(payload[:8], "little")
    head = json.loads(bytes(payload[8 : 8 + length]))
    numbers = array("i")
    numbers.frombytes(payload[8 + length :])
    sizes, lines, files = (_counts(head[name]) for name in ("sizes", "lines", "files"))
    if 2 * sum(sizes) != len(numbers):
        raise ValueError("other sizes than rows")
    rows, place = [], 0
    for size, line, file in zip(sizes, lines, files, strict=True):
        ids, labels = numbers[place : place + size], numbers[place + size : place + 2 * size]
        rows.append(Row(ids, labels, line, file))
        place += 2 * size
    return rows, DataReport.from_record(head["report"])


def _counts(values: object) -> list[int]:
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError("no counts")
    return values
