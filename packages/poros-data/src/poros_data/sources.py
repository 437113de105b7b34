"""Where rows come from: files, folders of files and data sets of the hub, each with a weight."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from poros_data.errors import DataError, explain

__all__ = ["DataFile", "Source", "Sources", "as_sources", "files_of", "missing_file"]

# By the end of a file's name; anything else that is named outright is read as JSON Lines.
KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".txt": "text",
}
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One entry of a run's ``data``.

    Attributes:
        name: a file, a folder or a hub id, as the user wrote it.
        weight: how often each of its rows comes in an epoch; 0.5 takes a random half, another one in every epoch.
    """

    name: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise DataError(explain("Bad data source", expected="a file, folder or hub id", got="nothing"))
        if not 0 < self.weight < math.inf:
            raise DataError(
                explain(
                    f"Bad weight of the data source `{self.name}`",
                    expected="a positive number",
                    got=self.weight,
                    next_step="Remove the source to leave it out",
                )
            )


Sources = str | Path | Source | Sequence[str | Path | Source] | Mapping[str, float]


def as_sources(spec: Sources) -> tuple[Source, ...]:
    """Return the sources that a name, a list of names or a mapping of names to weights stands for.

    Raises:
        DataError: there is none, one is named twice, or a weight is not positive.
    """
    if isinstance(spec, Mapping):
        made = [Source(name=str(name), weight=weight) for name, weight in spec.items()]
    else:
        items = [spec] if isinstance(spec, str | Path | Source) else list(spec)
        made = [item if isinstance(item, Source) else Source(name=str(item)) for item in items]
    if not made:
        raise DataError(explain("No data", expected="at least one source", got="none"))
    names = [source.name for source in made]
    if doubled := next((name for name in names if names.count(name) > 1), None):
        raise DataError(
            explain(
                "Bad data sources",
                expected="each source once",
                got=f"`{doubled}` twice",
                next_step="Give it a weight of 2 to see its rows twice per epoch",
            )
        )
    return tuple(made)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """One file of a source, or one data set of the hub.

    Attributes:
        name: what errors call it.
        kind: ``jsonl``, ``json``, ``parquet``, ``text`` or ``hub``.
    """

    name: str
    kind: str

    @property
    def unit(self) -> str:
        """What its rows are counted in: lines, or rows where there are no lines."""
        return "row" if self.kind in ("parquet", "hub") else "line"

    def where(self, place: int) -> str:
        """Return the name of the row at a 1-based line or row."""
        return f"{self.name}:{place}" if self.unit == "line" else f"{self.name}, row {place}"


def files_of(source: Source) -> tuple[list[DataFile], list[str]]:
    """Return the files of a source in the order of their names, and the names of files of a folder that are no data.

    Raises:
        DataError: there is no such file, folder or hub id, or the folder holds no data.
    """
    path = Path(source.name).expanduser()
    if path.is_dir():
        return _folder(path)
    if not path.exists() and _may_be_on_the_hub(source.name):
        return [DataFile(name=source.name, kind="hub")], []
    if not path.exists():
        raise missing_file(path)
    return [DataFile(name=str(path), kind=KINDS.get(path.suffix.lower(), "jsonl"))], []


def _folder(folder: Path) -> tuple[list[DataFile], list[str]]:
    files, others = [], []
    for path in _walk(folder):
        kind = KINDS.get(path.suffix.lower())
        if kind is None:
            others.append(str(path.relative_to(folder)))
        else:
            files.append(DataFile(name=str(path), kind=kind))
    if not files:
        raise DataError(
            explain(
                "Cannot read the data",
                expected=f"a folder with {', '.join(KINDS)} files",
                got=", ".join(others[:5]) or "an empty folder",
                where=str(folder),
                next_step="Name a file",
            )
        )
    return files, others


def _walk(folder: Path) -> Iterator[Path]:
    """Yield files in one order on every system; hidden ones (`.cache`, `.git`) are nobody's data."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _walk(path)
        else:
            yield path


def _may_be_on_the_hub(name: str) -> bool:
    """A mistyped path must not become a question to the network: it has a data file's ending or an existing folder."""
    repository = name.partition(":")[0]
    if not HUB_NAME.fullmatch(repository) or repository.startswith("."):
        return False
    return Path(repository).suffix.lower() not in KINDS and not Path(repository).parent.is_dir()


def missing_file(path: Path) -> DataError:
    """Return the error for a path where nothing is; the nearest name beside it is proposed."""
    siblings = [child.name for child in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, siblings, n=1)
    if close:
        next_step = f"Did you mean `{path.parent / close[0]}`"
    elif not path.parent.is_dir():
        next_step = f"The folder `{path.parent}` does not exist either"
    else:
        next_step = "Check the path"
    return DataError(
        explain(
            "Cannot read the data",
            expected="an existing file, or a folder of files",
            got="none",
            where=str(path),
            next_step=next_step,
        )
    )
