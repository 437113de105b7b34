"""What a chat template writes around an assistant turn, found by rendering a conversation of known words.

Shipped templates mark no turns, and what they write depends on the turn's place in the conversation, so the
markers are measured on the template itself instead of being listed per model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from poros_data.errors import DataError, explain
from poros_data.limits import bounded_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TurnMarkers", "find_markers", "render"]

# Words that no template looks for: users and replies of two turns, so that an earlier and the last turn both
# show, and a tool with its answer.
USER_1, REPLY_1, USER_2, REPLY_2 = "porosaskone", "porossayone", "porosasktwo", "porossaytwo"
TOOL, TOOL_ANSWER = "porostool", "porostoolsays"
# Templates without a thinking switch ignore it.
THINKING_SWITCHES: tuple[Mapping[str, Any], ...] = (
    {},
    {"enable_thinking": True},
    {"enable_thinking": False},
)


@dataclass(frozen=True, slots=True)
class TurnMarkers:
    r"""The text around assistant turns.

    Attributes:
        header: what opens every assistant turn (``<|im_start|>assistant\n``).
        prompts: every generation prompt of the template, longest first, ``header`` last. A thinking template
            has several (``<|im_start|>assistant\n<think>\n\n</think>\n\n`` with thinking off).
        terminators: the special tokens that end an assistant turn (``<|im_end|>``).
        tool_answer: the special tokens around a tool's answer where the template writes it *inside* an
            assistant turn (Gemma 4: ``<|tool_response>`` and ``<tool_response|>``), else None. The model stops at
            the first one, so it is supervised; what follows up to the second one is not the model's.
    """

    header: str
    prompts: tuple[str, ...]
    terminators: tuple[str, ...]
    tool_answer: tuple[str, str] | None = None


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: str | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    **switches: Any,
) -> str:
    """Render a conversation in one piece, with ``template`` or else the tokenizer's own one.

    Raises:
        DataError: the template raises (its own words are in the message), or takes too much time or memory.
    """
    try:
        with bounded_template():
            return str(
                tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=[dict(tool) for tool in tools] or None,
                    chat_template=template,
                    tokenize=False,
                    **switches,
                )
            )
    except DataError:
        raise
    except Exception as error:  # a template is a program: it may fail in any way
        raise DataError(
            f"The chat template refuses the conversation: {type(error).__name__}: {error}."
        ) from error


def find_markers(tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> TurnMarkers:
    """Return what a chat template (the tokenizer's own one, or ``template``) writes around assistant turns.

    Raises:
        DataError: the tokenizer has no template, or the template lacks a generation prompt or a special token
            after assistant turns. Supervised spans cannot be found then, and nothing else is trained instead.
    """
    if not template and not tokenizer.chat_template:
        raise DataError(
            explain(
                "Cannot render chat rows",
                expected="a tokenizer with a chat template",
                got="none",
                where=str(tokenizer.name_or_path) or None,
                next_step="Use an instruction-tuned model, name a template file in `rows.template`, or use rows in the "
                "`text` format",
            )
        )
    text = render(
        tokenizer,
        [
            _turn("user", USER_1),
            _turn("assistant", REPLY_1),
            _turn("user", USER_2),
            _turn("assistant", REPLY_2),
        ],
        template=template,
    )
    places = [text.find(word) for word in (USER_1, REPLY_1, USER_2, REPLY_2)]
    if -1 in places or places != sorted(places):
        raise _unsuitable("every turn of a conversation rendered in order", "turns left out or moved")
    before = [text[places[0] + len(USER_1) : places[1]], text[places[2] + len(USER_2) : places[3]]]
    after = [text[places[1] + len(REPLY_1) : places[2]], text[places[3] + len(REPLY_2) :]]
    prompts = _generation_prompts(tokenizer, template)
    header = min(prompts)
    while not all(p.startswith(header) for p in prompts) or not all(header in part for part in before):
        header = header[:-1]
    if not header.strip() or text.count(header) != 2:
        raise _unsuitable("a generation prompt that opens every assistant turn", repr(sorted(prompts)))
    terminators = {_first_special(tokenizer, part) for part in after}
    return TurnMarkers(
        header,
        (*sorted(prompts - {header}, key=len, reverse=True), header),
        tuple(sorted(terminators)),
        _tool_answer(tokenizer, template, header),
    )


def _turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _tool_answer(
    tokenizer: PreTrainedTokenizerBase, template: str | None, header: str
) -> tuple[str, str] | None:
    """Compare renders that end at a tool call, at its answer and at the reply."""
    call = {"id": TOOL, "type": "function", "function": {"name": TOOL, "arguments": {TOOL: TOOL}}}
    messages = [
        _turn("user", USER_1),
        _turn("assistant", "", tool_calls=[call]),
        _turn("tool", TOOL_ANSWER, name=TOOL, tool_call_id=TOOL),
        _turn("assistant", REPLY_1),
    ]
    try:
        text = render(tokenizer, messages, template=template)
        called = render(tokenizer, messages[:2], template=template)
        answered = render(tokenizer, messages[:3], template=template, add_generation_prompt=True)
    except DataError:  # a template without tools; rows that bring some are told so
        return None
    if TOOL_ANSWER not in text or REPLY_1 not in text or text.count(header) != 1:
        return None
    before = _common_prefix(text[: text.index(TOOL_ANSWER)], called)
    after = _common_prefix(text, answered)[text.index(TOOL_ANSWER) :]
    opens, closes = _last_special(tokenizer, before), _last_special(tokenizer, after)
    return (opens, closes) if opens and closes else None


def _generation_prompts(tokenizer: PreTrainedTokenizerBase, template: str | None) -> set[str]:
    prompts = set()
    for switches in THINKING_SWITCHES:
        asked = [_turn("user", USER_1)]
        closed = render(tokenizer, asked, template=template, add_generation_prompt=False, **switches)
        opened = render(tokenizer, asked, template=template, add_generation_prompt=True, **switches)
        if opened == closed or not opened.startswith(closed):
            raise _unsuitable("text that `add_generation_prompt` adds at the end", repr(opened[-80:]))
        prompts.add(opened[len(closed) :])
    return prompts


def _common_prefix(left: str, right: str) -> str:
    length = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
    return left[: min(len(left), len(right)) if length is None else length]


def _specials(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    return {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}


def _last_special(tokenizer: PreTrainedTokenizerBase, text: str) -> str | None:
    found = [
        (text.rindex(token) + len(token), len(token), token)
        for token in _specials(tokenizer)
        if token in text
    ]
    return max(found)[2] if found else None


def _first_special(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    found = [(text.index(token), -len(token), token) for token in _specials(tokenizer) if token in text]
    if not found:
        raise _unsuitable("a special token that ends an assistant turn", repr(text[:80]))
    return min(found)[2]


def _unsuitable(expected: str, got: str) -> DataError:
    return DataError(
        explain(
            "The chat template does not show where assistant turns begin and end",
            expected=expected,
            got=got,
            next_step="Use another tokenizer or template, or rows in the `prompt-completion` format",
        )
    )
