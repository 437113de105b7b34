"""Rendering a conversation once and finding what is supervised in it.

The rule: **supervised is what the model writes after the template's own generation prompt, up to and
including the turn's terminator.** A turn is supervised from the end of the longest generation prompt that the
render has there. So an empty think block that the template puts before an answer is context (it *is* the
generation prompt of thinking switched off), and a think block with the row's own reasoning is supervised.

What stands between two headers of assistant turns is called a *reply* here: one assistant message, or several that
the template joins into one turn (Gemma 4 does so across tool answers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from poros_data.errors import DataError, explain
from poros_data.formats import ChatExample, Message
from poros_data.markers import TurnMarkers, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RenderedChat", "render_chat"]

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """One conversation as the template writes it.

    Attributes:
        text: the full render.
        spans: (start, end) characters of every supervised stretch, in order.
        lost_roles: the role of every turn whose text is not (completely) in the render. Templates of the
            Qwen3 family drop the reasoning of earlier turns; others ignore roles.
    """

    text: str
    spans: tuple[Span, ...]
    lost_roles: tuple[str, ...]


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    markers: TurnMarkers,
    example: ChatExample,
    *,
    template: str | None = None,
) -> RenderedChat:
    """Render a conversation in one piece and locate its assistant turns in it.

    Raises:
        DataError: the template raises; a turn's text holds the template's own turn markers, so that its end
            could not be told; the render does not have one header per assistant turn; or tools are not in it.
    """
    _refuse_markers_in_text(markers, example.messages)
    text = render(tokenizer, example.messages, template=template, tools=example.tools)
    places = _replies(markers, text)
    replies = _group(example.messages, len(places), markers)
    bodies = [text[stretches[0][0] : stretches[-1][1]] if stretches else "" for _, stretches in places]
    _refuse_lost_tools(example, text, replies, bodies)
    spans: list[Span] = []
    for reply, (prompt_end, stretches) in zip(replies, places, strict=True):
        kept = _trained(example, reply, len(stretches))
        for keep, (start, end) in zip(kept, stretches, strict=True):
            if keep:
                spans.append((max(start, prompt_end), end))
    return RenderedChat(text, tuple(spans), tuple(_lost_roles(example.messages, text, replies, bodies)))


def _replies(markers: TurnMarkers, text: str) -> list[tuple[int, list[Span]]]:
    """Return, per reply, where its generation prompt ends and the stretches of it that the model writes."""
    found = []
    position = text.find(markers.header)
    while position != -1:
        prompt = next(prompt for prompt in markers.prompts if text.startswith(prompt, position))
        stretches = _stretches(markers, text, position + len(markers.header))
        found.append((position + len(prompt), stretches))
        behind = stretches[-1][1] if stretches else position + len(prompt)
        position = text.find(markers.header, behind)
    return found


def _stretches(markers: TurnMarkers, text: str, start: int) -> list[Span]:
    """Cut a reply at its terminator and around answers of tools that the template writes into it."""
    stretches: list[Span] = []
    opens, closes = markers.tool_answer or (None, None)
    while True:
        ends = [end + len(t) for t in markers.terminators if (end := text.find(t, start)) != -1]
        paused = -1 if opens is None else text.find(opens, start)
        if opens is None or paused == -1 or (ends and min(ends) <= paused):
            if ends:
                stretches.append((start, min(ends)))
            elif not stretches or text[start:].strip():
                raise DataError(
                    explain(
                        "The chat template leaves an assistant turn open",
                        expected=markers.terminators,
                        got=text[start:][:80],
                    )
                )
            return stretches
        if text[start:paused].strip():  # a second answer in a row is no pause of the model's
            stretches.append((start, paused + len(opens)))
        assert closes is not None
        resumed = text.find(closes, paused)
        if resumed == -1 or (ends and min(ends) < resumed):
            return stretches
        start = resumed + len(closes)


def _group(messages: Sequence[Message], num_headers: int, markers: TurnMarkers) -> list[list[int]]:
    """Return, per reply of the render, the indices of its assistant messages.

    The finest grouping with the right number is the right one: every header opens at least one message.
    """
    alone = [[index] for index, message in enumerate(messages) if message["role"] == "assistant"]
    groupings = [alone, _runs(messages, through=())]
    # Without marks around the answers they could not be told from what the model writes.
    if markers.tool_answer is not None:
        groupings.append(_runs(messages, through=("tool",)))
    for grouping in groupings:
        if len(grouping) == num_headers:
            return grouping
    raise DataError(
        explain(
            "The chat template does not open each assistant turn",
            expected=f"{len(alone)} times {markers.header!r}",
            got=num_headers,
        )
    )


def _runs(messages: Sequence[Message], *, through: tuple[str, ...]) -> list[list[int]]:
    groups: list[list[int]] = []
    last = None
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            if last == "assistant":
                groups[-1].append(index)
            else:
                groups.append([index])
        if message["role"] not in through:
            last = message["role"]
    return groups


def _trained(example: ChatExample, reply: Sequence[int], num_stretches: int) -> list[bool]:
    """Return which stretches of a reply are supervised."""
    wanted = [index not in example.context for index in reply]
    if len(set(wanted)) == 1:
        return wanted[:1] * num_stretches
    mixed = any(example.messages[i].get("tool_calls") and example.messages[i]["content"] for i in reply)
    if len(wanted) != num_stretches or mixed:
        raise DataError(
            explain(
                f"The chat template writes the turns {list(reply)} as one",
                expected="the same `train` in all of them",
                got=wanted,
                next_step="Set `train` alike in these turns",
            )
        )
    return wanted


def _refuse_markers_in_text(markers: TurnMarkers, messages: Sequence[Message]) -> None:
    always = (markers.header, *(markers.tool_answer or ()))
    for index, message in enumerate(messages):
        forbidden = (*always, *(markers.terminators if message["role"] in ("assistant", "tool") else ()))
        for key in ("content", "reasoning_content"):
            for marker in forbidden:
                if marker in message.get(key, ""):
                    raise DataError(
                        explain(
                            f"Turn {index} ({message['role']}) holds the chat template's own turn marker",
                            expected="text without it",
                            got=repr(marker),
                            next_step="Remove it from the row: the template writes it",
                        )
                    )


def _refuse_lost_tools(
    example: ChatExample, text: str, replies: Sequence[Sequence[int]], bodies: Sequence[str]
) -> None:
    """A template without tools leaves them out in silence: then something else would be trained."""
    lost = [tool["function"]["name"] for tool in example.tools if tool["function"]["name"] not in text]
    for reply, body in zip(replies, bodies, strict=True):
        for index in reply:
            calls = example.messages[index].get("tool_calls", ())
            lost += [call["function"]["name"] for call in calls if call["function"]["name"] not in body]
    if lost:
        raise DataError(
            explain(
                "The chat template leaves tools out",
                expected="every tool and tool call of the row in the rendered text",
                got=f"none of {lost[0]!r}",
                next_step="Use a model or a `rows.template` whose template has tools, or remove them from the row",
            )
        )


def _lost_roles(
    messages: Sequence[Message], text: str, replies: Sequence[Sequence[int]], bodies: Sequence[str]
) -> list[str]:
    """Compare without white space: templates trim and indent freely."""
    whole = _squeezed(text)
    lost = {
        index
        for index, message in enumerate(messages)
        if message["role"] != "assistant" and _squeezed(message["content"]) not in whole
    }
    for reply, body in zip(replies, map(_squeezed, bodies), strict=True):
        behind = 0
        for index in reply:  # each after the one before it: a joined turn may say the same twice
            said = _squeezed(messages[index]["content"])
            found = body.find(said, behind)
            behind = max(behind, found + len(said))
            if found == -1 or _squeezed(messages[index].get("reasoning_content", "")) not in body:
                lost.add(index)
    return [messages[index]["role"] for index in sorted(lost)]


def _squeezed(text: str) -> str:
    return "".join(text.split())
