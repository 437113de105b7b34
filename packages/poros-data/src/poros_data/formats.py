"""From one JSON object to the example that it stands for, one function per row format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poros_data.tools import call, tool_calls, tool_schemas
from poros_data.values import RowError, content, flag, optional_string, shown, string, turns

__all__ = [
    "ChatExample",
    "Example",
    "Message",
    "TextExample",
    "alpaca",
    "messages",
    "prompt_completion",
    "sharegpt",
    "text",
]

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
# Where a turn keeps what the model thought, and whether it is supervised; the first is this package's own name.
REASONING_KEYS = ("reasoning_content", "reasoning")
TRAIN_KEYS = ("train", "weight")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatExample:
    """A conversation that the chat template renders.

    Attributes:
        messages: as Transformers' templates take them.
        tools: schemas that the template writes.
        context: indices of assistant messages that are not supervised (``train: false``).
    """

    messages: list[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    context: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class TextExample:
    """Plain text without a template: ``prompt`` is context, ``text`` and the end-of-text token are supervised."""

    prompt: str
    text: str


Example = ChatExample | TextExample


def messages(row: Mapping[str, Any]) -> ChatExample:
    """Read ``{"messages": [{"role": ..., "content": ...}, ...]}``."""
    chat = _Chat(row)
    for index, turn in enumerate(turns(row["messages"], "messages")):
        at = f"`messages[{index}]"
        if "role" not in turn and "from" in turn:
            raise RowError(
                f"{at}`", "`role` and `content`", f"the keys {list(turn)}", "Name the column `conversations`"
            )
        role = string(turn.get("role"), f"{at}.role`")
        if role not in ROLES:
            raise RowError(f"{at}.role`", " | ".join(ROLES), repr(role), _role_advice(role))
        chat.add(role, turn.get("content"), turn, at, column="content")
    return chat.example()


def _role_advice(role: str) -> str | None:
    known = {
        **SHAREGPT_ROLES,
        "bot": "assistant",
        "model": "assistant",
        "developer": "system",
        "function": "tool",
    }
    meant = known.get(role.lower())
    return f"Write `{meant}`" if meant else None


def sharegpt(row: Mapping[str, Any]) -> ChatExample:
    """Read ``{"conversations": [{"from": "human", "value": ...}, ...]}``; ``function_call`` values hold a call."""
    chat = _Chat(row)
    for index, turn in enumerate(turns(row["conversations"], "conversations")):
        at = f"`conversations[{index}]"
        if "from" not in turn and "role" in turn:
            raise RowError(
                f"{at}`", "`from` and `value`", f"the keys {list(turn)}", "Name the column `messages`"
            )
        speaker = string(turn.get("from"), f"{at}.from`")
        if speaker not in SHAREGPT_ROLES:
            raise RowError(f"{at}.from`", " | ".join(SHAREGPT_ROLES), repr(speaker))
        value = turn.get("value")
        if speaker == "function_call":
            turn, value = {**turn, "tool_calls": [call(value, f"{at}.value`")]}, ""
        chat.add(SHAREGPT_ROLES[speaker], value, turn, at, column="value")
    return chat.example()


class _Chat:
    """A conversation in the making. It begins with the row's ``system`` column, if there is one."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.tools = tool_schemas(row)
        self.messages: list[Message] = []
        self.context: set[int] = set()
        # Many files keep the system prompt in a column of its own; leaving it out would train on something else.
        if system := optional_string(row.get("system"), "`system`"):
            self.messages.append({"role": "system", "content": system})

    def add(self, role: str, value: object, turn: Mapping[str, Any], at: str, *, column: str) -> None:
        """Add one turn; ``value`` is its text, which a turn with tool calls may leave out."""
        calls = tool_calls(turn, at)
        said = "" if calls and value is None else content(value, f"{at}.{column}`")
        message: Message = {"role": role, "content": said}
        for key in REASONING_KEYS:
            if turn.get(key) is not None:
                message["reasoning_content"] = string(turn[key], f"{at}.{key}`")
                break
        for key in ("name", "tool_call_id") if role == "tool" else ():
            if turn.get(key) is not None:
                message[key] = string(turn[key], f"{at}.{key}`")
        if calls:
            if role != "assistant":
                raise RowError(f"{at}`", "tool calls in assistant turns alone", f"one in a {role} turn")
            message["tool_calls"] = calls
        self._note_training(role, turn, at)
        self.messages.append(message)

    def _note_training(self, role: str, turn: Mapping[str, Any], at: str) -> None:
        for key in TRAIN_KEYS:
            trained = flag(turn.get(key), f"{at}.{key}`", default=role == "assistant")
            if not trained and role == "assistant":
                self.context.add(len(self.messages))
            if trained and role != "assistant" and key == "train":
                raise RowError(f"{at}.train`", "assistant turns alone to be trained", f"a {role} turn")

    def example(self) -> ChatExample:
        return ChatExample(self.messages, tuple(self.tools), frozenset(self.context))


def alpaca(row: Mapping[str, Any]) -> ChatExample:
    """Read ``{"instruction": ..., "input": ..., "output": ...}``; the input follows after an empty line.

    A ``history`` column of [question, answer] pairs comes first.
    """
    chat = _Chat(row)
    history = row.get("history")
    if history is not None and not isinstance(history, list):
        raise RowError("`history`", "an array of [question, answer] pairs", shown(history))
    for index, pair in enumerate(history or ()):
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError(f"`history[{index}]`", "a [question, answer] pair", shown(pair))
        for role, said in zip(("user", "assistant"), pair, strict=True):
            chat.add(role, said, {}, f"`history[{index}]", column=role)
    question = string(row["instruction"], "`instruction`")
    if given := optional_string(row.get("input"), "`input`"):
        question += "\n\n" + given
    chat.messages.append({"role": "user", "content": question})
    chat.messages.append({"role": "assistant", "content": string(row["output"], "`output`")})
    return chat.example()


def prompt_completion(row: Mapping[str, Any]) -> Example:
    """Read ``{"prompt": ..., "completion": ...}``: plain text of which the completion is supervised.

    Where both are arrays of turns they are one conversation, of which the completion's assistant turns are supervised.
    """
    if isinstance(row["prompt"], list) and isinstance(row["completion"], list):
        chat = messages({**row, "messages": row["prompt"] + row["completion"]})
        given = range(len(chat.messages) - len(row["completion"]))
        asked = [index for index in given if chat.messages[index]["role"] == "assistant"]
        return ChatExample(chat.messages, chat.tools, chat.context.union(asked))
    return TextExample(string(row["prompt"], "`prompt`"), string(row["completion"], "`completion`"))


def text(row: Mapping[str, Any]) -> TextExample:
    """Read ``{"text": ...}``: plain text, all of it supervised."""
    return TextExample("", string(row["text"], "`text`"))
