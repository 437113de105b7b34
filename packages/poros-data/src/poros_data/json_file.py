"""Reading `.json` files: one array of objects, or objects one after the other, on as many lines as they like."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from poros_data.errors import DataError, json_type
from poros_data.reader import (
    UTF8_BOM,
    BadLineError,
    Digest,
    DuplicateKeyError,
    Record,
    describe_bad_line,
    no_rows,
    read_object,
    refuse_foreign_format,
    refuse_lone_surrogates,
)
from poros_data.sources import missing_file

__all__ = ["read_json"]

BLANK = re.compile(r"[ \t\r\n]*")


def read_json(path: Path | str, *, digest: Digest | None = None) -> Iterator[Record]:
    """Yield the objects of a JSON file with the line that each begins on.

    Args:
        path: the file.
        digest: fed every byte of the file.

    Raises:
        DataError: the file is missing, unreadable, not UTF-8 or empty, or what it holds is no JSON or no object. Broken
            JSON cannot be read past the place where it breaks: ``file:line:column`` is named.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise missing_file(path) from None
    except OSError as error:
        raise DataError(f"Cannot read the data file `{path}`: {error.strerror or error}.") from error
    if digest is not None:
        digest.update(raw)
    refuse_foreign_format(path, raw)
    raw = raw.removeprefix(UTF8_BOM)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        reason = BadLineError(f"byte 0x{raw[error.start]:02x} is not UTF-8", 1, "Convert the file to UTF-8")
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(describe_bad_line(path, line, reason, b"", num_bad=1, num_rows=0)) from error
    num_rows = 0
    for record in _Scanner(path, text).records():
        num_rows += 1
        yield record
    if num_rows == 0:
        raise no_rows(path, "an empty array" if text.strip() else "an empty file")


class _Scanner:
    """Walks through the text from value to value and counts lines on the way."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text = path, text
        self.position, self.line, self.counted = 0, 1, 0
        self.decoder = json.JSONDecoder(object_pairs_hook=read_object)

    def records(self) -> Iterator[Record]:
        in_array = self._take("[")
        num_rows = 0
        while True:
            self._skip_blanks()
            if self.position == len(self.text):
                if in_array:
                    raise self._bad("the array does not end", num_rows, "Download the file again")
                return
            if in_array and self._take("]"):
                self._skip_blanks()
                if self.position < len(self.text):
                    raise self._bad("text after the array", num_rows, "Remove it")
                return
            if in_array and num_rows and not self._take(","):
                raise self._bad("no comma between two rows", num_rows, "Write `,` between them")
            self._skip_blanks()
            line = self._count_lines(self.position)
            yield Record(line, self._value(num_rows))
            num_rows += 1

    def _value(self, num_rows: int) -> dict[str, object]:
        start = self.position
        try:
            value, self.position = self.decoder.raw_decode(self.text, start)
        except json.JSONDecodeError as error:
            self.position = min(error.pos, len(self.text))
            raise self._bad(error.msg, num_rows, "Correct the file") from error
        except DuplicateKeyError as error:
            raise self._bad(str(error), num_rows, "Keep one of them") from error
        except RecursionError as error:
            raise self._bad("the JSON is nested too deeply", num_rows, "Flatten the row") from error
        except ValueError as error:  # a number of more digits than Python converts
            reason = str(error).partition(";")[0]
            raise self._bad(reason, num_rows, "Write the number as a string") from error
        if not isinstance(value, dict):
            self.position = start
            raise self._bad(f"a row is {json_type(value)}", num_rows, "Write each row as an object")
        try:
            refuse_lone_surrogates(self.text[start : self.position], value)
        except BadLineError as error:
            self.position = start + error.column - 1
            raise self._bad(error.reason, num_rows, error.next_step) from error
        return value

    def _take(self, character: str) -> bool:
        self._skip_blanks()
        if self.text.startswith(character, self.position):
            self.position += 1
            return True
        return False

    def _skip_blanks(self) -> None:
        found = BLANK.match(self.text, self.position)
        assert found is not None
        self.position = found.end()

    def _count_lines(self, position: int) -> int:
        self.line += self.text.count("\n", self.counted, position)
        self.counted = position
        return self.line

    def _bad(self, reason: str, num_rows: int, next_step: str) -> DataError:
        line = self._count_lines(self.position)
        start = self.text.rfind("\n", 0, self.position) + 1
        end = self.text.find("\n", start)
        excerpt = self.text[start : end if end != -1 else None].encode("utf-8", "replace")
        error = BadLineError(reason, self.position - start + 1, next_step)
        return DataError(describe_bad_line(self.path, line, error, excerpt, num_bad=1, num_rows=num_rows))
