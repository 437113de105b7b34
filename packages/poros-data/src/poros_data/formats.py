"""From one JSON object to the example that it stands for, one function per row format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from poros_data.errors import json_type

__all__ = [
    "ChatExample",
    "Example",
    "RowError",
    "TextExample",
    "alpaca",
    "messages",
    "prompt_completion",
    "sharegpt",
    "text",
]

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


class RowError(Exception):
    """What is wrong with a row in a known format."""

    def __init__(self, what: str, expected: str, got: str, next_step: str | None = None) -> None:
        super().__init__(what)
        self.what, self.expected, self.got, self.next_step = what, expected, got, next_step


def _shown(value: object) -> str:
    return json_type(value) if value is None else f"{json_type(value)}: {value!r:.40}"


def _string(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise RowError(what, "a string", _shown(value))
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
            got = f"a part of type {part.get('type')!r}" if isinstance(part, dict) else _shown(part)
            raise RowError(what, "text parts only", got, "Remove images, audio and files")
        parts.append(_string(part.get("text"), f"{what}, text part"))
    return "".join(parts)


def _turns(value: object, column: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list):
        raise RowError(f"`{column}`", "an array of turns", _shown(value))
    if not value:
        raise RowError(f"`{column}`", "at least one turn", "an empty array")
    for index, turn in enumerate(value):
        if not isinstance(turn, dict):
            raise RowError(f"`{column}[{index}]`", "an object", _shown(turn))
    return value


def _refuse_tools(row: Mapping[str, Any], turns: list[Mapping[str, Any]], column: str) -> None:
    """Tools change what the template renders: ignoring them would train on something else."""
    if row.get("tools"):
        raise RowError(
            "`tools`",
            "a conversation without tools",
            "tool schemas",
            "Remove the row: tools are not supported",
        )
    for index, turn in enumerate(turns):
        if turn.get("tool_calls") or turn.get("function_call"):
            raise RowError(
                f"`{column}[{index}]`",
                "a turn with text alone",
                "a tool call",
                "Remove the row: tools are not supported",
            )


def messages(row: Mapping[str, Any]) -> ChatExample:
    """Read ``{"messages": [{"role": ..., "content": ...}, ...]}``; ``reasoning_content`` is passed on."""
    turns = _turns(row["messages"], "messages")
    _refuse_tools(row, turns, "messages")
    messages = _system(row)
    for index, turn in enumerate(turns):
        at = f"`messages[{index}]"
        if "role" not in turn and "from" in turn:
            raise RowError(
                f"{at}`", "`role` and `content`", f"the keys {list(turn)}", "Name the column `conversations`"
            )
        role = _string(turn.get("role"), f"{at}.role`")
        if role not in ROLES:
            raise RowError(f"{at}.role`", " | ".join(ROLES), repr(role), _role_advice(role))
        message = {"role": role, "content": _content(turn.get("content"), f"{at}.content`")}
        if turn.get("reasoning_content") is not None:
            message["reasoning_content"] = _string(turn["reasoning_content"], f"{at}.reasoning_content`")
        messages.append(message)
    return ChatExample(messages)


def _role_advice(role: str) -> str | None:
    known = {**SHAREGPT_ROLES, "bot": "assistant", "model": "assistant", "developer": "system"}
    meant = known.get(role.lower())
    return f"Write `{meant}`" if meant else None


def sharegpt(row: Mapping[str, Any]) -> ChatExample:
    """Read ``{"conversations": [{"from": "human", "value": ...}, ...]}``."""
    turns = _turns(row["conversations"], "conversations")
    _refuse_tools(row, turns, "conversations")
    messages = _system(row)
    for index, turn in enumerate(turns):
        at = f"`conversations[{index}]"
        if "from" not in turn and "role" in turn:
            raise RowError(
                f"{at}`", "`from` and `value`", f"the keys {list(turn)}", "Name the column `messages`"
            )
        role = _string(turn.get("from"), f"{at}.from`")
        if role not in SHAREGPT_ROLES:
            raise RowError(f"{at}.from`", " | ".join(SHAREGPT_ROLES), repr(role))
        messages.append(
            {"role": SHAREGPT_ROLES[role], "content": _content(turn.get("value"), f"{at}.value`")}
        )
    return ChatExample(messages)


def _system(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """Many files keep the system prompt in a column of its own; leaving it out would train on something else."""
    system = _optional_string(row.get("system"), "`system`")
    return [{"role": "system", "content": system}] if system else []


def alpaca(row: Mapping[str, Any]) -> ChatExample:
    """Read ``{"instruction": ..., "input": ..., "output": ...}``; the input follows after an empty line."""
    question = _string(row["instruction"], "`instruction`")
    if given := _optional_string(row.get("input"), "`input`"):
        question += "\n\n" + given
    answer = _string(row["output"], "`output`")
    return ChatExample(
        [*_system(row), {"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    )


def prompt_completion(row: Mapping[str, Any]) -> TextExample:
    """Read ``{"prompt": ..., "completion": ...}``: plain text of which the completion is supervised."""
    return TextExample(_string(row["prompt"], "`prompt`"), _string(row["completion"], "`completion`"))


def text(row: Mapping[str, Any]) -> TextExample:
    """Read ``{"text": ...}``: plain text, all of it supervised."""
    return TextExample("", _string(row["text"], "`text`"))
