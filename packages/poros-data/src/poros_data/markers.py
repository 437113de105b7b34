"""What a chat template writes around an assistant turn, found by rendering a conversation of known words.

Shipped templates mark no turns, and what they write depends on the turn's place in the conversation, so the
markers are measured on the template itself instead of being listed per model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from poros_data.errors import DataError, explain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TurnMarkers", "find_markers", "render"]

# Words that no template looks for: users and replies of two turns, so that an earlier and the last turn both
# show.
USER_1, REPLY_1, USER_2, REPLY_2 = "porosaskone", "porossayone", "porosasktwo", "porossaytwo"
# Templates without a thinking switch ignore it.
THINKING_SWITCHES: tuple[Mapping[str, bool], ...] = (
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
    """

    header: str
    prompts: tuple[str, ...]
    terminators: tuple[str, ...]


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], **switches: Any) -> str:
    """Render a conversation with the tokenizer's own template, in one piece.

    Raises:
        DataError: the template raises; its own words are in the message.
    """
    try:
        return str(tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, **switches))
    except Exception as error:  # a template is a program: it may fail in any way
        raise DataError(
            f"The chat template refuses the conversation: {type(error).__name__}: {error}."
        ) from error


def find_markers(tokenizer: PreTrainedTokenizerBase) -> TurnMarkers:
    """Return what the tokenizer's chat template writes around assistant turns.

    Raises:
        DataError: the tokenizer has no template, or the template lacks a generation prompt or a special token
            after assistant turns. Supervised spans cannot be found then, and nothing else is trained instead.
    """
    if not tokenizer.chat_template:
        raise DataError(
            explain(
                "Cannot render chat rows",
                expected="a tokenizer with a chat template",
                got="none",
                where=str(tokenizer.name_or_path) or None,
                next_step="Use the tokenizer of an instruction-tuned model, or rows in the `text` format",
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
    )
    places = [text.find(word) for word in (USER_1, REPLY_1, USER_2, REPLY_2)]
    if -1 in places or places != sorted(places):
        raise _unsuitable("every turn of a conversation rendered in order", "turns left out or moved")
    before = [text[places[0] + len(USER_1) : places[1]], text[places[2] + len(USER_2) : places[3]]]
    after = [text[places[1] + len(REPLY_1) : places[2]], text[places[3] + len(REPLY_2) :]]
    prompts = _generation_prompts(tokenizer)
    header = min(prompts)
    while not all(p.startswith(header) for p in prompts) or not all(header in part for part in before):
        header = header[:-1]
    if not header.strip() or text.count(header) != 2:
        raise _unsuitable("a generation prompt that opens every assistant turn", repr(sorted(prompts)))
    terminators = {_first_special(tokenizer, part) for part in after}
    return TurnMarkers(
        header, (*sorted(prompts - {header}, key=len, reverse=True), header), tuple(sorted(terminators))
    )


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _generation_prompts(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    prompts = set()
    for switches in THINKING_SWITCHES:
        closed = render(tokenizer, [_turn("user", USER_1)], add_generation_prompt=False, **switches)
        opened = render(tokenizer, [_turn("user", USER_1)], add_generation_prompt=True, **switches)
        if opened == closed or not opened.startswith(closed):
            raise _unsuitable("text that `add_generation_prompt` adds at the end", repr(opened[-80:]))
        prompts.add(opened[len(closed) :])
    return prompts


def _first_special(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    found = [(text.index(token), -len(token), token) for token in special if token in text]
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
