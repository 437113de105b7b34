"""Reading the values of a row, each with a name for the error when it is of another type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from poros_data.errors import json_type

__all__ = ["RowError", "content", "flag", "json_value", "optional_string", "shown", "string", "turns"]


class RowError(Exception):
    """What is wrong with a row in a known format."""

    def __init__(self, what: str, expected: str, got: str, next_step: str | None = None) -> None:
        super().__init__(what)
        self.what, self.expected, self.got, self.next_step = what, expected, got, next_step


def shown(value: object) -> str:
    """Return a value's JSON type and its beginning."""
    return json_type(value) if value is None else f"{json_type(value)}: {value!r:.40}"


def string(value: object, what: str) -> str:
    """Return ``value`` if it is a string."""
    if not isinstance(value, str):
        raise RowError(what, "a string", shown(value))
    return value


def optional_string(value: object, what: str) -> str:
    """Return a string, and an empty one for null."""
    return "" if value is None else string(value, what)


def flag(value: object, what: str, *, default: bool) -> bool:
    """Return a boolean, ``default`` for null; 0 and 1 count, as OpenAI's ``weight`` has them."""
    if value is None:
        return default
    if isinstance(value, bool) or (isinstance(value, int | float) and value in (0, 1)):
        return bool(value)
    raise RowError(what, "true or false", shown(value))


def content(value: object, what: str) -> str:
    """Return a string, or the joined texts of OpenAI's list of text parts."""
    if not isinstance(value, list):
        return string(value, what)
    parts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            got = f"a part of type {part.get('type')!r}" if isinstance(part, dict) else shown(part)
            raise RowError(what, "text parts only", got, "Remove images, audio and files")
        parts.append(string(part.get("text"), f"{what}, text part"))
    return "".join(parts)


def turns(value: object, column: str) -> list[Mapping[str, Any]]:
    """Return a non-empty array of objects."""
    if not isinstance(value, list):
        raise RowError(f"`{column}`", "an array of turns", shown(value))
    if not value:
        raise RowError(f"`{column}`", "at least one turn", "an empty array")
    for index, turn in enumerate(value):
        if not isinstance(turn, dict):
            raise RowError(f"`{column}[{index}]`", "an object", shown(turn))
    return value


def json_value(value: object, what: str, expected: str) -> Any:
    """Return ``value``, parsed if it is a string that holds JSON: tables keep nested values as text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise RowError(what, f"{expected}, or a string that holds its JSON", shown(value)) from None
