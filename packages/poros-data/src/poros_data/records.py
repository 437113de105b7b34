"""The rows of one data file, whatever its kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from poros_data.errors import DataError, explain
from poros_data.json_file import read_json
from poros_data.reader import UTF8_BOM, Digest, Record, no_rows, read_jsonl, refuse_foreign_format
from poros_data.sources import DataFile
from poros_data.tables import read_hub, read_parquet

__all__ = ["read_records"]


def read_records(file: DataFile, *, digest: Digest | None = None) -> Iterator[Record]:
    """Yield every row of a file and its 1-based line (row, where the file has no lines).

    Args:
        file: one of `poros_data.sources.files_of`.
        digest: fed every byte of a file, every row of a hub data set.

    Raises:
        DataError: the file cannot be read, or something in it is not a row.
    """
    if file.kind == "jsonl":
        return read_jsonl(file.name, digest=digest)
    if file.kind == "json":
        return read_json(file.name, digest=digest)
    if file.kind == "parquet":
        return read_parquet(file.name, digest=digest)
    if file.kind == "hub":
        return read_hub(file.name, digest=digest)
    return _read_text(Path(file.name), digest)


def _read_text(path: Path, digest: Digest | None) -> Iterator[Record]:
    """A text file is one row in the `text` format."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"Cannot read the data file `{path}`: {error.strerror or error}.") from error
    if digest is not None:
        digest.update(raw)
    refuse_foreign_format(path, raw)
    try:
        text = raw.removeprefix(UTF8_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            explain(
                "Cannot read the text",
                expected="UTF-8",
                got=f"the byte 0x{raw[error.start]:02x}",
                where=f"{path}:{raw.count(bytes([10]), 0, error.start) + 1}",
                next_step="Convert the file, for example with `iconv -f WINDOWS-1252 -t UTF-8`",
            )
        ) from error
    if not text.strip():
        raise no_rows(path, "an empty file")
    yield Record(1, {"text": text})
