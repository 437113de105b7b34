"""Row formats: which one a row is in."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from poros_data import formats
from poros_data.errors import DataError, explain
from poros_data.formats import Example
from poros_data.values import RowError

__all__ = ["SCHEMAS", "Schema", "parse_row"]


@dataclass(frozen=True, slots=True)
class Schema:
    """One row format.

    Attributes:
        name: what reports call it.
        required: columns that make a row be in this format.
        parse: turns a row that has the required columns into an example.
    """

    name: str
    required: tuple[str, ...]
    parse: Callable[[Mapping[str, Any]], Example]


# Tried in this order, the first that fits wins: an alpaca file with a further, rendered `text` column is alpaca.
SCHEMAS = (
    Schema("messages", ("messages",), formats.messages),
    Schema("sharegpt", ("conversations",), formats.sharegpt),
    Schema("alpaca", ("instruction", "output"), formats.alpaca),
    Schema("prompt-completion", ("prompt", "completion"), formats.prompt_completion),
    Schema("text", ("text",), formats.text),
)


# Names that other trainers use for a column.
SYNONYMS = {
    "output": ("response", "answer", "target", "completion", "chosen"),
    "completion": ("response", "answer", "output"),
    "instruction": ("question", "query", "problem"),
    "prompt": ("question", "query"),
    "text": ("content", "body", "document"),
    "messages": ("dialog", "dialogue", "chat", "turns"),
    "conversations": ("conversation",),
}


def parse_row(row: Mapping[str, Any], *, where: str) -> tuple[str, Example]:
    """Return the name of the row's format and its example.

    The first format of `SCHEMAS` whose required columns all have a value is taken; other columns are ignored.

    Args:
        row: one JSON object.
        where: ``file:line``, for errors.

    Raises:
        DataError: no format fits (the keys seen, the formats and the nearest one are named), or a value of
            the format has the wrong type.
    """
    fitting = [schema for schema in SCHEMAS if all(column in row for column in schema.required)]
    if not fitting:
        raise DataError(
            explain(
                "Unknown row format",
                expected=" | ".join("+".join(schema.required) for schema in SCHEMAS),
                got=f"the keys {list(row)}",
                where=where,
                next_step=_nearest(row),
            )
        )
    # Files that were written from a table have every column in every row, null where it does not apply.
    filled = [schema for schema in fitting if all(row[column] is not None for column in schema.required)]
    schema = (filled or fitting)[0]
    try:
        return schema.name, schema.parse(row)
    except RowError as error:
        raise DataError(
            explain(
                f"Bad row in the `{schema.name}` format: {error.what}",
                expected=error.expected,
                got=error.got,
                where=where,
                next_step=error.next_step,
            )
        ) from None


def _nearest(row: Mapping[str, Any]) -> str:
    """Name the format that needs the fewest renames, if any is near."""
    best: tuple[float, str] | None = None
    for schema in SCHEMAS:
        similar = {column: _similar(column, row) for column in schema.required}
        score = sum(1.0 if column in row else 0.6 if similar[column] else 0.0 for column in schema.required)
        score /= len(schema.required)
        if score < 0.5 or (best is not None and score <= best[0]):
            continue
        changes = [
            f"rename `{near}` to `{column}`" if (near := similar[column]) else f"add `{column}`"
            for column in schema.required
            if column not in row
        ]
        best = score, f"Nearest is `{schema.name}`: {', '.join(changes)}"
    if best:
        return best[1]
    for key, value in row.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            if all("role" in item for item in value):
                return _turns_without_answer(row, key) or f"Rename `{key}` to `messages`: it holds turns"
            return f"If the rows are what stands in `{key}`: `jq -c '.{key}[]' FILE > rows.jsonl`"
    return "Rename the columns to one of these formats (docs/data.md shows a row of each)"


def _turns_without_answer(row: Mapping[str, Any], key: str) -> str | None:
    """Say how an evaluation row, whose answer stands beside its turns, becomes a conversation; None if it is none."""
    if row[key][-1]["role"] == "assistant":
        return None
    for other, value in row.items():
        answer = value[0] if isinstance(value, list) and value else value
        if other != key and isinstance(answer, str):
            path = f".{other}[0]" if isinstance(value, list) else f".{other}"
            turn = f'{{role: "assistant", content: {path}}}'
            return (
                f"`{key}` holds turns without an answer; if `{other}` is the answer: "
                f"`jq -c '{{messages: (.{key} + [{turn}])}}' FILE > rows.jsonl`"
            )
    return None


def _similar(column: str, row: Mapping[str, Any]) -> str | None:
    taken = {name for schema in SCHEMAS for name in schema.required}
    free = [key for key in row if key not in taken]
    lowered = {key.lower(): key for key in free}
    for name in (column, *SYNONYMS.get(column, ())):
        if name in lowered:
            return lowered[name]
    close = difflib.get_close_matches(column, lowered, n=1, cutoff=0.75)
    return lowered[close[0]] if close else None
