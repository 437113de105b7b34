"""Tokenized rows on disk, so that a second start neither renders nor tokenizes.

One file per key, written beside its place and renamed into it: two processes that make the same file make the same
bytes, and a reader sees a whole file or none. Its sha256 stands in its head; a file that does not match it is
replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import warnings
from array import array
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from poros_data.errors import DataError, explain
from poros_data.report import DataReport
from poros_data.rows import Row

__all__ = ["RowCache"]

# Raised whenever the same files, template, tokenizer and settings make other rows, or the file's form changes.
FORM = 1
MAGIC = b"poros rows\n"


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
        path = self.path(key)
        try:
            raw = path.read_bytes()
        except OSError:
            return None
        start = len(MAGIC) + hashlib.sha256().digest_size
        payload = memoryview(raw)[start:]
        if raw[: len(MAGIC)] != MAGIC or raw[len(MAGIC) : start] != hashlib.sha256(payload).digest():
            warnings.warn(f"The tokenized rows in `{path}` are damaged and are made anew.", stacklevel=2)
            return None
        length = int.from_bytes(payload[:8], "little")
        head = json.loads(bytes(payload[8 : 8 + length]))
        numbers = array("i")
        numbers.frombytes(payload[8 + length :])
        rows, place = [], 0
        for size, line, file in zip(head["sizes"], head["lines"], head["files"], strict=True):
            ids, labels = numbers[place : place + size], numbers[place + size : place + 2 * size]
            rows.append(Row(ids, labels, line, file))
            place += 2 * size
        return rows, DataReport.from_record(head["report"])

    def save(self, key: str, rows: Sequence[Row], report: DataReport) -> None:
        """Write the rows and report of a key.

        Raises:
            DataError: the folder cannot be written to.
        """
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
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".rows-", delete=False) as file:
                try:
                    file.write(MAGIC + hashlib.sha256(payload).digest() + payload)
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    Path(file.name).unlink(missing_ok=True)
                    raise
            os.replace(file.name, self.path(key))
        except OSError as error:
            raise DataError(
                explain(
                    "Cannot keep tokenized rows",
                    expected="a folder that can be written to",
                    got=error.strerror or error,
                    where=str(self._folder),
                    next_step="Name another `cache_dir`, or none",
                )
            ) from error
