"""Rendering a conversation once and finding what is supervised in it.

The rule: **supervised is what the model writes after the template's own generation prompt, up to and
including the turn's terminator.** A turn is supervised from the end of the longest generation prompt that the
render has there. So an empty think block that the template puts before an answer is context (it *is* the
generation prompt of thinking switched off), and a think block with the row's own reasoning is supervised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from poros_data.errors import DataError, explain
from poros_data.markers import TurnMarkers, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RenderedChat", "render_chat"]


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
    spans: tuple[tuple[int, int], ...]
    lost_roles: tuple[str, ...]


def render_chat(
    tokenizer: PreTrainedTokenizerBase, markers: TurnMarkers, messages: Sequence[Mapping[str, str]]
) -> RenderedChat:
    """Render a conversation in one piece and locate its assistant turns in it.

    Raises:
        DataError: the template raises; a turn's text holds the template's own turn markers, so that its end
            could not be told; or the render does not have one header per assistant turn.
    """
    _refuse_markers_in_text(markers, messages)
    text = render(tokenizer, messages)
    spans, bodies = [], []
    position = text.find(markers.header)
    while position != -1:
        prompt = next(prompt for prompt in markers.prompts if text.startswith(prompt, position))
        body = position + len(markers.header)
        ends = [end + len(t) for t in markers.terminators if (end := text.find(t, body)) != -1]
        if not ends:
            raise DataError(
                explain(
                    "The chat template leaves an assistant turn open",
                    expected=markers.terminators,
                    got=text[body:][:80],
                )
            )
        spans.append((position + len(prompt), min(ends)))
        bodies.append(text[body : min(ends)])
        position = text.find(markers.header, min(ends))
    num_replies = sum(message["role"] == "assistant" for message in messages)
    if len(spans) != num_replies:
        raise DataError(
            explain(
                "The chat template does not open each assistant turn",
                expected=f"{num_replies} times {markers.header!r}",
                got=len(spans),
            )
        )
    return RenderedChat(text, tuple(spans), tuple(_lost_roles(messages, text, bodies)))


def _refuse_markers_in_text(markers: TurnMarkers, messages: Sequence[Mapping[str, str]]) -> None:
    for index, message in enumerate(messages):
        forbidden = (markers.header, *(markers.terminators if message["role"] == "assistant" else ()))
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


def _lost_roles(messages: Sequence[Mapping[str, str]], text: str, bodies: Sequence[str]) -> list[str]:
    """Compare without white space: templates trim and indent freely."""
    whole = _squeezed(text)
    replies = iter(bodies)
    lost = []
    for message in messages:
        place = _squeezed(next(replies)) if message["role"] == "assistant" else whole
        if any(_squeezed(message.get(key, "")) not in place for key in ("content", "reasoning_content")):
            lost.append(message["role"])
    return lost


def _squeezed(text: str) -> str:
    return "".join(text.split())
