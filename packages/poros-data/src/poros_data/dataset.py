"""Reading a data file into tokenized rows, with an account of everything that did not become one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from poros_data.encode import Encoded, Encoder
from poros_data.errors import DataError, explain
from poros_data.formats import Example
from poros_data.reader import Digest, read_jsonl
from poros_data.report import Count, DataReport
from poros_data.rows import Row, digest_rows
from poros_data.schemas import parse_row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Dataset", "load_dataset"]

T = TypeVar("T")
# Rows that are tokenized in one call: enough to keep the tokenizer's threads busy, little enough to hold
# offsets for.
ROWS_PER_CALL = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """Tokenized rows of one file.

    Attributes:
        rows: in the order of the file.
        report: what was read, dropped and lost.
        parts: sha256 of ``data`` (the file's bytes), ``template``, ``tokenizer``, ``settings`` and ``rows``
            (ids and labels), so that a changed fingerprint can be explained.
    """

    rows: Sequence[Row]
    report: DataReport
    parts: Mapping[str, str]

    @property
    def fingerprint(self) -> str:
        """One sha256 over all `parts`."""
        return hashlib.sha256(json.dumps(dict(self.parts), sort_keys=True).encode()).hexdigest()


def load_dataset(
    path: Path | str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    unusable_rows: Literal["drop", "error"] = "drop",
    stop_token_ids: Iterable[int] = (),
) -> Dataset:
    """Read, render and tokenize a JSON Lines file.

    Nothing is truncated: a row is used whole or not at all. A row is unusable if it has more than
        ``max_length`` tokens
    or no supervised token.

    Args:
        path: JSON Lines; `poros_data.SCHEMAS` lists the row formats, which may be mixed.
        tokenizer: a fast tokenizer of Transformers; chat rows need its chat template.
        max_length: T of the longest row to keep.
        unusable_rows: ``drop`` leaves them out and counts them by reason; ``error`` stops at the first.
        stop_token_ids: tokens besides the tokenizer's ``eos_token`` at which generation stops (the
            ``eos_token_id`` of the model's generation config), for the warning about the last supervised
            token.

    Raises:
        DataError: the file cannot be read, a line or row is bad, a template refuses a row, or no row is
            usable.
    """
    if max_length < 2:
        raise DataError(explain("Bad setting `max_length`", expected="2 or more", got=max_length))
    if unusable_rows not in ("drop", "error"):
        raise DataError(
            explain("Bad setting `unusable_rows`", expected="drop | error", got=repr(unusable_rows))
        )
    digest = hashlib.sha256()
    schemas, lines, examples = _read(path, digest)
    tally = _Tally(str(path), max_length, stop=unusable_rows == "error")
    for line, encoded in zip(lines, _encode(path, Encoder(tokenizer), lines, examples), strict=True):
        tally.add(line, encoded)
    if not tally.rows:
        raise DataError(
            explain(
                "Nothing to train on",
                expected="at least one supervised token",
                got="; ".join(f"{c.count} rows dropped: {reason}" for reason, c in tally.dropped.items()),
                where=str(path),
                next_step="Raise `max_length`, or give rows an assistant turn with text",
            )
        )
    return Dataset(
        rows=tuple(tally.rows),
        report=_report(str(path), tokenizer, tally, schemas, stop_token_ids),
        parts={
            "data": digest.hexdigest(),
            "template": _sha256(tokenizer.chat_template),
            "tokenizer": _tokenizer_sha256(tokenizer),
            "settings": _sha256({"max_length": max_length, "unusable_rows": unusable_rows}),
            "rows": digest_rows(tally.rows),
        },
    )


def _read(path: Path | str, digest: Digest) -> tuple[dict[str, int], list[int], list[Example]]:
    """Return rows per format, and the line and example of every row. All rows are read before one is refused."""
    schemas: dict[str, int] = {}
    lines, examples, errors = [], [], []
    for record in read_jsonl(path, digest=digest):
        try:
            schema, example = parse_row(record.value, where=f"{path}:{record.line}")
        except DataError as error:
            errors.append(error)
            continue
        schemas[schema] = schemas.get(schema, 0) + 1
        lines.append(record.line)
        examples.append(example)
    if errors:
        num_rows = len(errors) + len(lines)
        raise DataError(f"{errors[0]} {len(errors)} of {num_rows} rows cannot be used.") from errors[0]
    return schemas, lines, examples


@dataclass(slots=True)
class _Tally:
    """Rows kept and the account of the others."""

    path: str
    max_length: int
    stop: bool
    rows: list[Row] = field(default_factory=list)
    dropped: dict[str, Count] = field(default_factory=dict)
    lost_turns: dict[str, Count] = field(default_factory=dict)

    def add(self, line: int, encoded: Encoded) -> None:
        row = Row(encoded.input_ids, encoded.labels, line)
        if len(row.input_ids) > self.max_length:
            self._drop(row, f"longer than max_length {self.max_length}", f"{len(row.input_ids)} tokens")
        elif row.num_supervised == 0:
            self._drop(row, "no supervised token", "no assistant turn or no text")
        else:
            self.rows.append(row)
            for role in encoded.lost_roles:
                _count(self.lost_turns, role, line)

    def _drop(self, row: Row, reason: str, got: str) -> None:
        if self.stop:
            raise DataError(
                explain(
                    "Unusable row",
                    expected=f"1 to {self.max_length} tokens, at least one supervised",
                    got=got,
                    where=f"{self.path}:{row.line}",
                    next_step="Shorten or remove it, raise `max_length`, or set `unusable_rows: drop`",
                )
            )
        _count(self.dropped, reason, row.line)


def _count(counts: dict[str, Count], key: str, line: int) -> None:
    known = counts.get(key)
    counts[key] = Count(count=known.count + 1 if known else 1, first_line=known.first_line if known else line)


def _encode(
    path: Path | str, encoder: Encoder, lines: Sequence[int], examples: Sequence[Example]
) -> Iterator[Encoded]:
    pairs = ((f"{path}:{line}", example) for line, example in zip(lines, examples, strict=True))
    while chunk := list(islice(pairs, ROWS_PER_CALL)):
        yield from encoder.encode(chunk)


def _report(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    tally: _Tally,
    schemas: Mapping[str, int],
    stop_token_ids: Iterable[int],
) -> DataReport:
    last = next(label for label in reversed(tally.rows[0].labels) if label >= 0)
    last_token = tokenizer.convert_ids_to_tokens(last)
    warnings = [
        f"{count.count} {role} turns lost text in the chat template (first: line {count.first_line})"
        for role, count in tally.lost_turns.items()
    ]
    if last != tokenizer.eos_token_id and last not in set(stop_token_ids):
        warnings.append(
            f"row 0 (line {tally.rows[0].line}) ends with the supervised token `{last_token}`, which does not stop "
            f"generation (the tokenizer's eos_token is `{tokenizer.eos_token}`): the model may never stop"
        )
    return DataReport(
        path=path,
        num_rows=len(tally.rows),
        schemas=schemas,
        dropped=tally.dropped,
        lost_turns=tally.lost_turns,
        supervised_tokens=sum(row.num_supervised for row in tally.rows),
        total_tokens=sum(len(row.input_ids) for row in tally.rows),
        longest_tokens=max(len(row.input_ids) for row in tally.rows),
        last_supervised_token=last_token,
        warnings=tuple(warnings),
    )


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash what turns text into ids. Padding and truncation are left out: calls set them on the tokenizer."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state.pop("padding", None)
    state.pop("truncation", None)
    return _sha256([state, tokenizer.special_tokens_map])
