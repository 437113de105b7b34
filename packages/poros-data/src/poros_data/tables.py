"""Reading rows from Parquet files and from data sets of the hub. Both need a library that not everybody needs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from poros_data.errors import DataError, explain
from poros_data.reader import Digest, Record, no_rows

__all__ = ["read_hub", "read_parquet"]

# A colon, unless it is inside the brackets of a slice such as `train[:10%]`.
SEPARATOR = re.compile(r":(?![^\[]*\])")
ROWS_PER_BATCH = 1024
BYTES_PER_READ = 1 << 20
# What the hub's libraries say when a data set is private or its licence was not accepted.
NOT_ALLOWED = ("401", "403", "gated", "Unauthorized")


def read_parquet(path: Path | str, *, digest: Digest | None = None) -> Iterator[Record]:
    """Yield the rows of a Parquet file with their 1-based numbers.

    Raises:
        DataError: `pyarrow` is missing, or the file is no Parquet file.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            explain(
                "Cannot read Parquet",
                expected="the package `pyarrow`",
                got="none",
                where=str(path),
                next_step="Install it: `uv add 'poros-data[parquet]'`",
            )
        ) from error
    path = Path(path)
    number = 0
    try:
        if digest is not None:
            with path.open("rb") as file:
                while block := file.read(BYTES_PER_READ):
                    digest.update(block)
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=ROWS_PER_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield Record(number, row)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(
            explain(
                "Cannot read Parquet",
                expected="a Parquet file",
                got=_first_line(error),
                where=str(path),
                next_step="Download the file again",
            )
        ) from error
    if number == 0:
        raise no_rows(path, "a table without rows")


def read_hub(name: str, *, digest: Digest | None = None) -> Iterator[Record]:
    """Yield the rows of a data set of the hub with their 1-based numbers.

    Args:
        name: ``owner/name``, ``owner/name:split`` or ``owner/name:config:split``; the split is ``train`` if left out.
        digest: fed every row.

    Raises:
        DataError: `datasets` is missing, or it cannot load the data set: offline, unknown, not allowed.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            explain(
                "Cannot read the data",
                expected="a file or folder, or the package `datasets` for a data set of the hub",
                got="neither",
                where=name,
                next_step="Check the path, or install it: `uv add 'poros-data[hub]'`",
            )
        ) from error
    repository, *rest = SEPARATOR.split(name)
    config = rest[0] if len(rest) > 1 else None
    split = rest[-1] if rest else "train"
    try:
        rows: Any = datasets.load_dataset(repository, config, split=split)
    except Exception as error:  # the library raises whatever its own libraries do
        reason = _first_line(error)
        refused = any(word in reason for word in NOT_ALLOWED)
        raise DataError(
            explain(
                "Cannot load the data set from the hub",
                expected=f"the split `{split}` of `{repository}`",
                got=reason,
                next_step="The licence is not accepted or you are not logged in: `hf auth login`"
                if refused
                else "Check the name and the network, or download it and name the files",
            )
        ) from error
    number = 0
    for number, row in enumerate(rows, start=1):
        if digest is not None:
            digest.update(repr(sorted(row.items())).encode("utf-8", "surrogatepass"))
        yield Record(number, row)
    if number == 0:
        raise no_rows(Path(name), "a split without rows")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
