r"""Reading JSON Lines: one JSON object per line, lines split on ``\n`` only, nothing skipped but blank lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from poros_data.errors import DataError, explain, json_type
from poros_data.sources import missing_file

__all__ = ["Digest", "Record", "read_jsonl"]

EXCERPT_CHARACTERS = 80
UTF8_BOM = b"\xef\xbb\xbf"
# What a file that is no UTF-8 text starts with, and what to do about it.
MAGIC = {
    b"\xff\xfe": ("UTF-16 text", "Save it as UTF-8"),
    b"\xfe\xff": ("UTF-16 text", "Save it as UTF-8"),
    b"\x1f\x8b": ("a gzip archive", "Unpack it with `gunzip`"),
    b"\x28\xb5\x2f\xfd": ("a zstd archive", "Unpack it with `unzstd`"),
    b"PK\x03\x04": ("a zip archive", "Unpack it with `unzip`"),
    b"PAR1": ("a Parquet file", "Let its name end in `.parquet`"),
    b"version https://git-lfs": ("a Git LFS pointer", "Fetch the real file with `git lfs pull`"),
}


@dataclass(frozen=True, slots=True)
class Record:
    """One JSON object and the 1-based line that it stands on."""

    line: int
    value: dict[str, Any]


class Digest(Protocol):
    """The part of a `hashlib` object that the reader feeds."""

    def update(self, data: bytes, /) -> None:
        """Add bytes."""


class BadLineError(Exception):
    """Why one line is not a JSON object, and the 1-based column where that shows."""

    def __init__(self, reason: str, column: int, next_step: str) -> None:
        super().__init__(reason)
        self.reason, self.column, self.next_step = reason, column, next_step


def read_jsonl(path: Path | str, *, digest: Digest | None = None) -> Iterator[Record]:
    r"""Yield the objects of a JSON Lines file.

    Blank lines, ``\r\n``, a UTF-8 byte order mark and a missing final newline are fine. Lines end at ``\n``
    alone: U+2028 and the like are legal inside a JSON string.

    Args:
        path: the file.
        digest: fed every byte of the file, once the iterator is exhausted.

    Raises:
        DataError: the file is missing, a folder, unreadable, not UTF-8 or empty; or a line is not one JSON
            object. Then the first such line is shown as ``file:line:column`` and the whole file is read to
            count the others.
    """
    path = Path(path)
    first_error: tuple[int, BadLineError, bytes] | None = None
    num_bad = num_rows = line = 0
    try:
        with path.open("rb") as file:
            for line, raw in enumerate(file, start=1):
                if digest is not None:
                    digest.update(raw)
                if line == 1:
                    refuse_foreign_format(path, raw)
                    raw = raw.removeprefix(UTF8_BOM)
                raw = raw.rstrip(b"\r\n")
                if not raw.strip(b" \t\r"):
                    continue
                try:
                    value = _parse(raw)
                except BadLineError as error:
                    num_bad += 1
                    first_error = first_error or (line, error, raw)
                    continue
                num_rows += 1
                if first_error is None:
                    yield Record(line, value)
    except FileNotFoundError:
        raise missing_file(path) from None
    except OSError as error:
        raise DataError(f"Cannot read the data file `{path}`: {error.strerror or error}.") from error
    if first_error is not None:
        raise DataError(describe_bad_line(path, *first_error, num_bad=num_bad, num_rows=num_rows))
    if num_rows == 0:
        got = "an empty file" if line == 0 else f"{line} blank lines"
        raise no_rows(path, got)


def no_rows(path: Path, got: str) -> DataError:
    """Return the error for a file without rows."""
    return DataError(
        explain(
            "No data",
            expected="at least one row",
            got=got,
            where=str(path),
            next_step='Write one JSON object per line, for example `{"text": "..."}`',
        )
    )


def refuse_foreign_format(path: Path, head: bytes) -> None:
    """Refuse a file that begins like no text file."""
    for magic, (found, next_step) in MAGIC.items():
        if head.startswith(magic):
            raise DataError(
                explain(
                    "Cannot read the data",
                    expected="JSON Lines in UTF-8",
                    got=found,
                    where=str(path),
                    next_step=next_step,
                )
            )


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadLineError(
            f"byte 0x{raw[error.start]:02x} is not UTF-8",
            len(raw[: error.start].decode("utf-8")) + 1,
            "Convert the file, for example with `iconv -f WINDOWS-1252 -t UTF-8`",
        ) from error
    try:
        value = json.loads(text, object_pairs_hook=read_object)
    except json.JSONDecodeError as error:
        raise BadLineError(error.msg, error.pos + 1, _advice(text, error)) from error
    except DuplicateKeyError as error:
        raise BadLineError(str(error), text.find(json.dumps(error.key)) + 1, "Keep one of them") from error
    except RecursionError as error:
        raise BadLineError("the JSON is nested too deeply", 1, "Flatten the row") from error
    except ValueError as error:  # a number of more digits than Python converts
        raise BadLineError(str(error).partition(";")[0], 1, "Write the number as a string") from error
    if isinstance(value, list):
        raise BadLineError(
            "this is a JSON array, not JSON Lines",
            _column(text),
            "Let the file's name end in `.json`, or write one object per line: `jq -c '.[]' FILE`",
        )
    if not isinstance(value, dict):
        raise BadLineError(
            f"the line holds {json_type(value)}", _column(text), "Write one JSON object per line"
        )
    refuse_lone_surrogates(text, value)
    return value


class DuplicateKeyError(ValueError):
    """An object has one key twice: one of the values would be lost."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key `{key}` stands twice in one object")
        self.key = key


def read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object of its pairs; for `json.JSONDecoder`. Raises `DuplicateKeyError`."""
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKeyError(key)
            seen.add(key)
    return value


def refuse_lone_surrogates(text: str, value: dict[str, Any]) -> None:
    """Half of a surrogate pair is legal JSON, but no tokenizer takes it."""
    if "\\u" not in text:
        return
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise BadLineError(
            f"`{half}` is half of a surrogate pair", text.lower().find(half) + 1, "Write the whole character"
        ) from error


def _column(text: str) -> int:
    return len(text) - len(text.lstrip()) + 1


def _advice(text: str, error: json.JSONDecodeError) -> str:
    start = text.lstrip()
    if start.startswith("["):
        return (
            "This is JSON, not JSON Lines. Let the file's name end in `.json`, or write one object per line: "
            "`jq -c '.[]' FILE`"
        )
    if start.startswith("<"):
        return "This looks like a web page. Download the file itself"
    if error.msg == "Extra data":
        return "Write one object per line; `jq -c . FILE` separates several on one line"
    if error.msg.startswith("Invalid control character"):
        return "Escape control characters inside strings (a line break is `\\n`)"
    if error.msg.startswith("Unterminated string"):
        return "A line break inside a string is written `\\n`"
    if start and error.pos >= len(text.rstrip()):
        return "The object goes on after the line's end. Write each object on one line: `jq -c . FILE`"
    if not start.startswith("{"):
        return "Write one JSON object per line; CSV and plain text are not JSON Lines"
    return "Correct the line"


def describe_bad_line(
    path: Path, line: int, error: BadLineError, raw: bytes, *, num_bad: int, num_rows: int
) -> str:
    excerpt = raw.decode("utf-8", errors="replace")
    shown = excerpt[:EXCERPT_CHARACTERS] + ("..." if len(excerpt) > EXCERPT_CHARACTERS else "")
    total = f"{num_bad} bad {'line' if num_bad == 1 else 'lines'} in the file, {num_rows} good"
    return explain(
        f"Bad line in the data ({path}:{line}:{error.column})",
        expected="one JSON object",
        got=f"{json.dumps(shown, ensure_ascii=False)}: {error.reason}",
        where=total,
        next_step=error.next_step,
    )
