"""Conversations whose turns a template refuses, made acceptable without losing a word. Only where the user asks."""

from __future__ import annotations

from collections.abc import Iterator

from poros_data.formats import ChatExample, Message

__all__ = ["repairs"]

JOINT = "\n\n"


def repairs(example: ChatExample) -> Iterator[ChatExample]:
    """Yield what may stand for ``example``, the smallest change first; nothing where there is nothing to change.

    First, neighbours of one role become one turn. Then the system turn also goes to the head of the first user turn.
    """
    merged = _merge_neighbours(example)
    if merged.messages != example.messages:
        yield merged
    folded = _fold_system(merged)
    if folded.messages != merged.messages:
        yield folded


def _merge_neighbours(example: ChatExample) -> ChatExample:
    messages: list[Message] = []
    context: set[int] = set()
    for index, message in enumerate(example.messages):
        last = messages[-1] if messages else None
        same = last is not None and last["role"] == message["role"] != "tool"
        # What is supervised must not change: a trained turn and an untrained one stay two.
        if last is None or not same or (len(messages) - 1 in context) != (index in example.context):
            if index in example.context:
                context.add(len(messages))
            messages.append(dict(message))
            continue
        for key in ("content", "reasoning_content"):
            if key in message:
                last[key] = JOINT.join(part for part in (last.get(key, ""), message[key]) if part)
        if "tool_calls" in message:
            last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
    return ChatExample(messages, example.tools, frozenset(context))


def _fold_system(example: ChatExample) -> ChatExample:
    first, rest = example.messages[0], example.messages[1:]
    if first["role"] != "system" or not rest or rest[0]["role"] != "user":
        return example
    asked = {**rest[0], "content": first["content"] + JOINT + rest[0]["content"]}
    return ChatExample([asked, *rest[1:]], example.tools, frozenset(index - 1 for index in example.context))
