"""Row formats: which one a row is in, and the example that it stands for."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from poros_data.errors import DataError, explain

__all__ = ["SCHEMAS", "ChatExample", "Example", "Schema", "TextExample", "parse_row"]

ROLES = ("system", "user", "assistant")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}


@dataclass(frozen=True, slots=True)
class ChatExample:
    """A conversation that the chat template renders; every assistant turn is supervised."""

    messages: list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class TextExample:
    """Plain text without a template: ``prompt`` is context, ``text`` and the end-of-text token are supervised."""

    prompt: str
    text: str


Example = ChatExample | TextExample


@dataclass(frozen=True, slots=True)
class Schema:
    """One row format.

    Attributes:
        name: what reports call it.
        required: columns that make a row be in this format.
        optional: further columns that the format reads; all others are ignored.
        parse: turns a row that has the required columns into an example.
    """

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    parse: Callable[[Mapping[str, Any]], Example]


class _RowError(Exception):
    """What is wrong with a row in a known format."""

    def __init__(self, what: str, expected: str, got: str, next_step: str | None = None) -> None:
        super().__init__(what)
        self.what, self.expected, self.got, self.next_step = what, expected, got, next_step


def parse_row(row: Mapping[str, Any], *, where: str) -> tuple[str, Example]:
    """Return the name of the row's format and its example.

    The first format of `SCHEMAS` whose required columns are all there is taken; other columns are ignored.

    Args:
        row: one JSON object.
        where: ``file:line``, for errors.

    Raises:
        DataError: no format fits (the keys seen, the formats and the nearest one are named), or a value of
            the format has the wrong type.
    """
    for schema in SCHEMAS:
        if all(column in row for column in schema.required):
            try:
                return schema.name, schema.parse(row)
            except _RowError as error:
                raise DataError(
                    explain(
                        f"Bad row in the `{schema.name}` format: {error.what}",
                        expected=error.expected,
                        got=error.got,
                        where=where,
                        next_step=error.next_step,
                    )
                ) from None
    raise DataError(
        explain(
            "Unknown row format",
            expected=" | ".join("+".join(schema.required) for schema in SCHEMAS),
            got=f"the keys {list(row)}",
            where=where,
            next_step=_nearest(row),
        )
    )


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
    return (
        best[1] if best else "Rename the columns to one of these formats (docs/data.md shows a row of each)"
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


def _similar(column: str, row: Mapping[str, Any]) -> str | None:
    taken = {name for schema in SCHEMAS for name in schema.required}
    free = [key for key in row if key not in taken]
    lowered = {key.lower(): key for key in free}
    for name in (column, *SYNONYMS.get(column, ())):
        if name in lowered:
            return lowered[name]
    close = difflib.get_close_matches(column, lowered, n=1, cutoff=0.75)
    return lowered[close[0]] if close else None


def _string(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise _RowError(
            what, "a string", "null" if value is None else f"{type(value).__name__} {value!r:.40}"
        )
    return value


def _optional_string(value: object, what: str) -> str:
    return "" if value is None else _string(value, what)


def _content(value: object, what: str) -> str:
    """A string, or OpenAI's list of text parts."""
    if not isinstance(value, list):
        return _string(value, what)
    parts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise _RowError(
                what, "text parts only", f"a part of type {kind!r}", "Remove images, audio and files"
            )
        parts.append(_string(part.get("text"), f"{what}, text part"))
    return "".join(parts)


def _turns(value: object, column: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list):
        raise _RowError(f"`{column}`", "a list of turns", f"{type(value).__name__} {value!r:.40}")
    if not value:
        raise _RowError(f"`{column}`", "at least one turn", "an empty list")
    for index, turn in enumerate(value):
        if not isinstance(turn, dict):
            raise _RowError(f"`{column}[{index}]`", "an object", f"{type(turn).__name__} {turn!r:.40}")
    return value


def _refuse_tools(row: Mapping[str, Any], turns: list[Mapping[str, Any]], column: str) -> None:
    """Tools change what the template renders: ignoring them would train on something else."""
    if row.get("tools"):
        raise _RowError(
            "`tools`",
            "a conversation without tools",
            "tool schemas",
            "Remove the row: tools are not supported",
        )
    for index, turn in enumerate(turns):
        if turn.get("tool_calls") or turn.get("function_call"):
            raise _RowError(
                f"`{column}[{index}]`",
                "a turn with text alone",
                "a tool call",
                "Remove the row: tools are not supported",
            )


def _messages(row: Mapping[str, Any]) -> ChatExample:
    turns = _turns(row["messages"], "messages")
    _refuse_tools(row, turns, "messages")
    messages = []
    for index, turn in enumerate(turns):
        at = f"`messages[{index}]"
        if "role" not in turn and "from" in turn:
            raise _RowError(
                f"{at}`", "`role` and `content`", f"the keys {list(turn)}", "Name the column `conversations`"
            )
        role = _string(turn.get("role"), f"{at}.role`")
        if role not in ROLES:
            raise _RowError(f"{at}.role`", " | ".join(ROLES), repr(role), _role_advice(role))
        message = {"role": role, "content": _content(turn.get("content"), f"{at}.content`")}
        if turn.get("reasoning_content") is not None:
            message["reasoning_content"] = _string(turn["reasoning_content"], f"{at}.reasoning_content`")
        messages.append(message)
    return ChatExample(messages)


def _role_advice(role: str) -> str | None:
    known = {**SHAREGPT_ROLES, "bot": "assistant", "model": "assistant", "developer": "system"}
    meant = known.get(role.lower())
    return f"Write `{meant}`" if meant else None


def _sharegpt(row: Mapping[str, Any]) -> ChatExample:
    turns = _turns(row["conversations"], "conversations")
    _refuse_tools(row, turns, "conversations")
    messages = _system(row)
    for index, turn in enumerate(turns):
        at = f"`conversations[{index}]"
        if "from" not in turn and "role" in turn:
            raise _RowError(
                f"{at}`", "`from` and `value`", f"the keys {list(turn)}", "Name the column `messages`"
            )
        role = _string(turn.get("from"), f"{at}.from`")
        if role not in SHAREGPT_ROLES:
            raise _RowError(f"{at}.from`", " | ".join(SHAREGPT_ROLES), repr(role))
        messages.append(
            {"role": SHAREGPT_ROLES[role], "content": _content(turn.get("value"), f"{at}.value`")}
        )
    return ChatExample(messages)


def _system(row: Mapping[str, Any]) -> list[dict[str, str]]:
    system = _optional_string(row.get("system"), "`system`")
    return [{"role": "system", "content": system}] if system else []


def _alpaca(row: Mapping[str, Any]) -> ChatExample:
    question = _string(row["instruction"], "`instruction`")
    if given := _optional_string(row.get("input"), "`input`"):
        question += "\n\n" + given
    answer = _string(row["output"], "`output`")
    return ChatExample(
        [*_system(row), {"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    )


def _prompt_completion(row: Mapping[str, Any]) -> TextExample:
    return TextExample(_string(row["prompt"], "`prompt`"), _string(row["completion"], "`completion`"))


def _text(row: Mapping[str, Any]) -> TextExample:
    return TextExample("", _string(row["text"], "`text`"))


# In the order in which they are tried: the first that fits wins, so a row with `text` *and* `instruction` is
# alpaca.
SCHEMAS = (
    Schema("messages", ("messages",), (), _messages),
    Schema("sharegpt", ("conversations",), ("system",), _sharegpt),
    Schema("alpaca", ("instruction", "output"), ("input", "system"), _alpaca),
    Schema("prompt-completion", ("prompt", "completion"), (), _prompt_completion),
    Schema("text", ("text",), (), _text),
)
