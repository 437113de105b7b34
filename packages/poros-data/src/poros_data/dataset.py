"""Reading sources into tokenized rows, with an account of everything that did not become one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from poros_data.cache import RowCache
from poros_data.encode import Encoded, Encoder, Rendered
from poros_data.errors import DataError, explain
from poros_data.records import read_records
from poros_data.report import DataReport, SourceReport
from poros_data.rows import Row, digest_rows
from poros_data.schemas import parse_row
from poros_data.settings import RowSettings, read_template
from poros_data.sources import DataFile, Source, Sources, as_sources, files_of
from poros_data.tally import Tally

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Dataset", "load_dataset"]

# Rows that are tokenized in one call: enough to keep the tokenizer's threads busy, little enough to hold
# offsets for.
ROWS_PER_CALL = 512
BYTES_PER_READ = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """Tokenized rows of one or several sources.

    Attributes:
        rows: in the order of the sources and their files.
        files: what `Row.file` counts.
        weights: per file, how often its rows come in an epoch.
        report: what was read, dropped and lost.
        parts: sha256 of ``data`` (the files' bytes), ``template``, ``tokenizer``, ``settings`` and ``rows``
            (ids and labels), so that a changed fingerprint can be explained.
    """

    rows: Sequence[Row]
    files: Sequence[DataFile]
    weights: Sequence[float]
    report: DataReport
    parts: Mapping[str, str]

    @property
    def fingerprint(self) -> str:
        """One sha256 over all `parts`."""
        return _sha256(dict(self.parts))

    @property
    def row_weights(self) -> Sequence[float] | None:
        """Per row, how often it comes in an epoch; None where every row comes once. For `poros_data.StepPlan`."""
        if all(weight == 1 for weight in self.weights):
            return None
        return [self.weights[row.file] for row in self.rows]

    def where(self, row: Row) -> str:
        """Return the file and line of a row."""
        return self.files[row.file].where(row.line)


def load_dataset(
    sources: Sources,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    settings: RowSettings | None = None,
    stop_token_ids: Iterable[int] = (),
    cache_dir: Path | str | None = None,
) -> Dataset:
    """Read, render and tokenize rows.

    Args:
        sources: a file (JSON Lines, JSON, Parquet, text), a folder of files or a hub id; a list of these; or a
            mapping of these to weights. `poros_data.SCHEMAS` lists the row formats, which may be mixed.
        tokenizer: a fast tokenizer of Transformers; chat rows need a chat template.
        max_length: T of the longest row to keep; longer ones follow ``settings.truncation``.
        settings: see `RowSettings`.
        stop_token_ids: tokens besides the tokenizer's ``eos_token`` at which generation stops (the
            ``eos_token_id`` of the model's generation config), for the warning about the last supervised
            token.
        cache_dir: folder for tokenized rows: the second call with the same files, template, tokenizer and settings
            reads them from there. None keeps none.

    Raises:
        DataError: a source cannot be read, a line or row is bad, a template refuses a row, or no row is
            usable.
    """
    settings = settings or RowSettings()
    if max_length < 2:
        raise DataError(explain("Bad setting `max_length`", expected="2 or more", got=max_length))
    template = read_template(settings.template)
    reading = _Reading(as_sources(sources))
    parts = {
        "template": _sha256(template if template is not None else tokenizer.chat_template),
        "tokenizer": _tokenizer_sha256(tokenizer),
        "settings": _sha256(
            {"max_length": max_length, "truncation": settings.truncation, "repair": settings.repair}
        ),
    }
    cache = None if cache_dir is None else RowCache(Path(cache_dir))
    stops = sorted(set(stop_token_ids))
    key = None
    if cache is not None and (data := reading.digest_files()) is not None:
        key = _sha256([data, parts, stops, [(source.name, source.weight) for source in reading.sources]])
        if (found := cache.load(key)) is not None:
            rows, report = found
            return reading.dataset(rows, report, {"data": data, **parts})
    encoder = Encoder(tokenizer, template=template, repair=settings.repair)
    tally = Tally(reading.files, max_length, settings.truncation, tokenizer.bos_token_id)
    for file, line, encoded in reading.encode(encoder):
        tally.add(file, line, encoded)
    notes = (
        () if template is None else (f"rendered with {settings.template}: generate with the same template",)
    )
    report = tally.report(tokenizer, reading.reports(tally.rows), stops, notes)
    # A file that was written to between the two readings has no place in the cache.
    if cache is not None and key is not None and reading.data == data:
        cache.save(key, tally.rows, report)
    return reading.dataset(tally.rows, report, {"data": reading.data, **parts})


@dataclass(slots=True)
class _Reading:
    """One pass over the files of all sources."""

    sources: Sequence[Source]
    files: list[DataFile] = field(default_factory=list)
    source_of: list[int] = field(default_factory=list)
    ignored: list[list[str]] = field(default_factory=list)
    schemas: list[dict[str, int]] = field(default_factory=list)
    errors: list[DataError] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for index, source in enumerate(self.sources):
            files, ignored = files_of(source)
            self.files += files
            self.source_of += [index] * len(files)
            self.ignored.append(ignored)
            self.schemas.append({})

    @property
    def data(self) -> str:
        """The digest of everything that was read; of one file, its sha256."""
        return self.digests[0] if len(self.digests) == 1 else _sha256(self.digests)

    def digest_files(self) -> str | None:
        """Return what `data` will be, or None where the bytes are not on this machine."""
        if any(file.kind == "hub" for file in self.files):
            return None
        digests = []
        for file in self.files:
            digest = hashlib.sha256()
            try:
                with open(file.name, "rb") as stream:
                    while block := stream.read(BYTES_PER_READ):
                        digest.update(block)
            except OSError:  # the reader says it better
                return None
            digests.append(digest.hexdigest())
        return digests[0] if len(digests) == 1 else _sha256(digests)

    def encode(self, encoder: Encoder) -> Iterator[tuple[int, int, Encoded]]:
        """Yield (file, line, encoded row). All rows are read before one is refused.

        Raises:
            DataError: rows cannot be used: the first is named, and how many there are.
        """
        rendered = self._render(encoder)
        while chunk := list(islice(rendered, ROWS_PER_CALL)):
            if self.errors:
                continue
            encoded = encoder.tokenize([item for _, _, item in chunk])
            for (file, line, _), row in zip(chunk, encoded, strict=True):
                yield file, line, row
        if self.errors:
            total = sum(sum(schemas.values()) for schemas in self.schemas)
            raise DataError(
                f"{self.errors[0]} {len(self.errors)} of {total} rows cannot be used."
            ) from self.errors[0]

    def _render(self, encoder: Encoder) -> Iterator[tuple[int, int, Rendered]]:
        for index, file in enumerate(self.files):
            digest = hashlib.sha256()
            schemas = self.schemas[self.source_of[index]]
            for record in read_records(file, digest=digest):
                where = file.where(record.line)
                name, rendered = "unknown", None
                try:
                    name, example = parse_row(record.value, where=where)
                    rendered = encoder.render(where, example)
                except DataError as error:
                    self.errors.append(error)
                schemas[name] = schemas.get(name, 0) + 1
                if rendered is not None:
                    yield index, record.line, rendered
            self.digests.append(digest.hexdigest())

    def reports(self, rows: Sequence[Row]) -> tuple[SourceReport, ...]:
        """Return what every source brought."""
        kept = [0] * len(self.sources)
        for row in rows:
            kept[self.source_of[row.file]] += 1
        return tuple(
            SourceReport(
                name=source.name,
                weight=source.weight,
                num_files=self.source_of.count(index),
                schemas=self.schemas[index],
                num_rows=kept[index],
                ignored=tuple(self.ignored[index]),
            )
            for index, source in enumerate(self.sources)
        )

    def dataset(self, rows: Sequence[Row], report: DataReport, parts: Mapping[str, str]) -> Dataset:
        """Return the finished data set."""
        return Dataset(
            rows=tuple(rows),
            files=tuple(self.files),
            weights=tuple(self.sources[index].weight for index in self.source_of),
            report=report,
            parts={**parts, "rows": digest_rows(rows)},
        )


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash what turns text into ids. Padding and truncation are left out: calls set them on the tokenizer."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state.pop("padding", None)
    state.pop("truncation", None)
    return _sha256([state, tokenizer.special_tokens_map])
