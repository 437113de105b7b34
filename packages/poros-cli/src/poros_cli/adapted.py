"""A base and an adapter as `poros merge` and `poros generate` name them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poros.errors import CheckpointError, ConfigError, explain
from poros.export import AdaptedModel, Adapter
from poros_cli.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["base_of", "probe_tokens"]

PROBE = "The quick brown fox jumps over the lazy dog. In 1969, two people walked on the moon; def f(x): return 2 * x"
# Of the probe; and how many spread over the vocabulary stand for it where there is no tokenizer.
PROBE_TOKENS = 32


def base_of(adapter: Adapter | None, model: str | None) -> str:
    """Return the base that the user or the adapter names.

    Raises:
        ConfigError: neither does.
    """
    name = model or (adapter.base_model if adapter is not None else None)
    if name is None:
        raise ConfigError(
            explain(
                "No base model",
                expected="`--model DIR`" + ("" if adapter is None else ", because the adapter names none"),
                got="nothing",
            )
        )
    return name


def probe_tokens(adapted: AdaptedModel) -> Sequence[int]:
    """Return the tokens of a short text, or some of the vocabulary where the model has no tokenizer of its own."""
    vocabulary = int(adapted.model.meta.config.vocab_size)
    try:
        tokenizer = load_tokenizer(adapted.model.folder)
        ids = [token for token in tokenizer(PROBE)["input_ids"][:PROBE_TOKENS] if token < vocabulary]
    except CheckpointError:  # none in the folder: any tokens do
        ids = []
    return ids or [index * vocabulary // PROBE_TOKENS for index in range(PROBE_TOKENS)]
