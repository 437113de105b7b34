"""From examples to token ids and labels."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from poros_data.chat import RenderedChat, render_chat
from poros_data.errors import DataError, explain
from poros_data.formats import ChatExample, Example
from poros_data.markers import TurnMarkers, find_markers
from poros_data.repair import repairs
from poros_data.rows import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Encoded", "Encoder", "Rendered"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Ids and labels of one example (see `poros_data.Row`), and what happened to it on the way.

    Attributes:
        lost_roles: the roles of turns that lost text in rendering.
        plain: it was text without a template.
        repaired: its turns were merged for a template that refused them.
    """

    input_ids: array[int]
    labels: array[int]
    lost_roles: tuple[str, ...] = ()
    plain: bool = False
    repaired: bool = False


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text to tokenize with its supervised spans; ``plain`` text gets the special tokens that chats bring along.

    Attributes:
        where: the row's place, for errors.
    """

    where: str
    text: str
    spans: tuple[tuple[int, int], ...]
    plain: bool
    lost_roles: tuple[str, ...] = ()
    repaired: bool = False


class Encoder:
    """Renders and tokenizes examples with one tokenizer.

    Rendered chats are tokenized without further special tokens: the template wrote them. Plain text begins
    with exactly one beginning-of-text token if the tokenizer adds one by itself, and ends with the end-of-text
    token, supervised.

    Raises:
        DataError: the tokenizer gives no character offsets.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, template: str | None = None, repair: bool = False
    ) -> None:
        """Prepare to encode.

        Args:
            tokenizer: a fast tokenizer.
            template: the user's own chat template; None takes the tokenizer's.
            repair: merge turns of a conversation that the template refuses (see `poros_data.repair`).
        """
        if not tokenizer.is_fast:
            raise DataError(
                explain(
                    "Cannot locate supervised text",
                    expected="a fast tokenizer, which gives character offsets",
                    got=type(tokenizer).__name__,
                    next_step="Load the model's `tokenizer.json` with `AutoTokenizer`",
                )
            )
        self._tokenizer = tokenizer
        self._template = template
        self._repair = repair
        self._markers: TurnMarkers | None = None
        bos = tokenizer.bos_token_id
        self._bos_of_text = bos if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else None

    def encode(self, examples: Sequence[tuple[str, Example]]) -> list[Encoded]:
        """Return ids and labels of (``file:line``, example) pairs: `render`, then `tokenize`."""
        return self.tokenize([self.render(where, example) for where, example in examples])

    def render(self, where: str, example: Example) -> Rendered:
        """Return one example as text with its supervised spans.

        Raises:
            DataError: the template refuses the conversation, or spans cannot be found in it; ``where`` is named.
        """
        if not isinstance(example, ChatExample):
            text = example.prompt + example.text
            return Rendered(where, text, ((len(example.prompt), len(text)),), plain=True)
        if self._markers is None:
            self._markers = find_markers(self._tokenizer, self._template)
        try:
            chat = self._render_chat(example)
            return Rendered(where, chat.text, chat.spans, plain=False, lost_roles=chat.lost_roles)
        except DataError as error:
            refused = error
        for repaired in repairs(example):
            try:
                chat = self._render_chat(repaired)
            except DataError:
                continue
            if self._repair:
                return Rendered(
                    where, chat.text, chat.spans, plain=False, lost_roles=chat.lost_roles, repaired=True
                )
            refused = DataError(f"{refused} `rows.repair: true` merges such turns and counts the rows.")
            break
        raise DataError(f"{where}: {refused}") from refused

    def _render_chat(self, example: ChatExample) -> RenderedChat:
        assert self._markers is not None
        return render_chat(self._tokenizer, self._markers, example, template=self._template)

    def tokenize(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        """Return ids and labels of rendered examples, tokenized together for speed.

        Raises:
            DataError: a row begins with two beginning-of-text tokens, or plain text cannot be ended.
        """
        if not rendered:
            return []
        encoding = self._tokenizer(
            [item.text for item in rendered],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            padding=False,
            truncation=False,
            verbose=False,  # its length warning: lengths are the data set's business
        )
        return [
            self._label(item, ids, offsets)
            for item, ids, offsets in zip(
                rendered, encoding["input_ids"], encoding["offset_mapping"], strict=True
            )
        ]

    def _label(self, item: Rendered, ids: list[int], offsets: Sequence[tuple[int, int]]) -> Encoded:
        input_ids, labels = array("i", ids), array("i", [IGNORED]) * len(ids)
        begins, ends = _ranges(offsets)
        for start, end in item.spans:
            first, last = bisect_right(ends, start), bisect_left(begins, end)
            labels[first:last] = input_ids[first:last]
        if item.plain:
            self._add_specials(input_ids, labels)
        bos = self._tokenizer.bos_token_id
        if bos is not None and list(input_ids[:2]) == [bos, bos]:
            raise DataError(
                explain(
                    "The row begins twice",
                    expected="one beginning-of-text token",
                    got=f"two `{self._tokenizer.bos_token}`",
                    where=item.where,
                    next_step="Remove it from the row or from the chat template",
                )
            )
        if labels:
            labels[0] = IGNORED
        return Encoded(input_ids, labels, item.lost_roles, item.plain, item.repaired)

    def _add_specials(self, input_ids: array[int], labels: array[int]) -> None:
        bos, eos = self._bos_of_text, self._tokenizer.eos_token_id
        if eos is None:
            raise DataError(
                explain(
                    "Cannot end plain text",
                    expected="a tokenizer with an `eos_token`",
                    got="none",
                    where=str(self._tokenizer.name_or_path) or None,
                    next_step="Set `eos_token` in the model's `tokenizer_config.json`",
                )
            )
        if bos is not None and (not input_ids or input_ids[0] != bos):
            input_ids.insert(0, bos)
            labels.insert(0, IGNORED)
        if not labels or labels[-1] != eos:
            input_ids.append(eos)
            labels.append(eos)


def _ranges(offsets: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return the first and the behind-last character of every token, without gaps.

    Some tokenizers report offsets without a token's white space, which leaves a token of white space alone
    empty: the gap before a token is its own. Tokens that share one character (the bytes of an emoji) keep
    their shared range.
    """
    ends = [end for _, end in offsets]
    begins = [min(begin, previous) for (begin, _), previous in zip(offsets, [0, *ends], strict=False)]
    return begins, ends
