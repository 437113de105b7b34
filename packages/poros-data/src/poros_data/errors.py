"""What is wrong with the user's data: found, expected, where, and what to do next."""

from __future__ import annotations

__all__ = ["DataError", "explain", "json_type"]


class DataError(ValueError):
    """The user's data, or how it should be read, is at fault: one message, no traceback, exit code 2."""

    exit_code = 2


def explain(
    what: str, *, expected: object, got: object, where: str | None = None, next_step: str | None = None
) -> str:
    """Return ``<what>: expected <X>, got <Y> (<where>). <next step>.`` as one line (the words of `poros.errors`)."""
    message = f"{what}: expected {expected}, got {got}"
    if where:
        message += f" ({where})"
    message += "."
    if next_step:
        message += " " + next_step.rstrip(".") + "."
    return message


def json_type(value: object) -> str:
    """Return what JSON calls a value that `json.loads` made."""
    if value is None:
        return "null"
    names: dict[type, str] = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return names.get(type(value), f"a {type(value).__name__}")  # tables hold more kinds than JSON
