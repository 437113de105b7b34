"""Tool schemas and tool calls in the one form that chat templates take.

Files keep them in several: as objects or as JSON text, with or without OpenAI's ``function`` envelope. Templates differ
in what they make of the others (Qwen2.5 writes text arguments quoted a second time, Gemma 4 refuses them), so
everything is brought into OpenAI's form with arguments as objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poros_data.values import RowError, json_value, shown, string

__all__ = ["call", "tool_calls", "tool_schemas"]


def tool_schemas(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the ``tools`` column as ``{"type": "function", "function": {"name": ...}}`` objects; empty for none."""
    value = row.get("tools")
    if value is None or value == "":
        return []
    value = json_value(value, "`tools`", "an array of tool schemas")
    if not isinstance(value, list):
        raise RowError("`tools`", "an array of tool schemas", shown(value))
    schemas = []
    for index, schema in enumerate(value):
        at = f"`tools[{index}]`"
        schema = json_value(schema, at, "a tool schema")
        function = schema.get("function", schema) if isinstance(schema, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(at, '`{"type": "function", "function": {"name": ...}}`', shown(schema))
        schemas.append({"type": "function", "function": function})
    return schemas


def tool_calls(turn: Mapping[str, Any], at: str) -> list[dict[str, Any]]:
    """Return the calls of an assistant turn; OpenAI's older ``function_call`` is one call."""
    if turn.get("function_call"):
        return [call(turn["function_call"], f"{at}.function_call`")]
    value = turn.get("tool_calls")
    if not value:
        return []
    value = json_value(value, f"{at}.tool_calls`", "an array of tool calls")
    if not isinstance(value, list):
        raise RowError(f"{at}.tool_calls`", "an array of tool calls", shown(value))
    return [call(item, f"{at}.tool_calls[{index}]`") for index, item in enumerate(value)]


def call(value: object, what: str) -> dict[str, Any]:
    """Return one call as ``{"type": "function", "function": {"name", "arguments"}}`` with its id, if it has one."""
    value = json_value(value, what, "a tool call")
    function = (value.get("function") or value) if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict):
        raise RowError(what, '`{"function": {"name": ..., "arguments": {...}}}`', shown(value))
    arguments = function.get("arguments")
    arguments = {} if arguments in (None, "") else json_value(arguments, f"{what}, arguments", "an object")
    if not isinstance(arguments, dict):
        raise RowError(f"{what}, arguments", "an object", shown(arguments))
    name = string(function.get("name"), f"{what}, name")
    made: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if isinstance(value.get("id"), str):
        made["id"] = value["id"]
    return made
