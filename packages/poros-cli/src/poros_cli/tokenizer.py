"""The tokenizer of a model folder, from its files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from poros.checkpoint.paths import refuse_links_outside
from poros.errors import CheckpointError, explain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["load_tokenizer", "stop_token_ids"]

# Generation stops at the ids of the first of these that has any.
GENERATION_CONFIGS = ("generation_config.json", "config.json")
# One of these holds the vocabulary. Without any, Transformers builds an empty tokenizer of the model's type.
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "*.tiktoken")

# What Transformers reads besides.
TOKENIZER_FILES = (*VOCABULARY_FILES, "*.json", "*.jinja", "merges.txt", "vocab.txt")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the fast tokenizer of a model folder; nothing is downloaded and no code of the model is run.

    Raises:
        CheckpointError: there is none, it cannot be read, or a file of it is a link to somewhere else.
    """
    from transformers import AutoTokenizer

    refuse_links_outside(folder, TOKENIZER_FILES)
    if not any(next(folder.glob(name), None) for name in VOCABULARY_FILES):
        raise _unreadable(folder, "none of these files")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library raises whatever its parsers do
        raise _unreadable(folder, _first_line(error)) from error
    longest = tokenizer.model_max_length  # compared with every row's length
    if not isinstance(longest, int | float):
        raise _unreadable(folder, f"a `model_max_length` of {longest!r:.80}, which is no number")
    return tokenizer


def stop_token_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids at which the model's own files say that generation stops; empty where they say nothing."""
    for name in GENERATION_CONFIGS:
        try:
            config = json.loads((folder / name).read_text(encoding="utf-8"))
            value = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
        except (
            OSError,
            ValueError,
            AttributeError,
            RecursionError,
        ):  # absent or unreadable: only a warning depends on it
            continue
        values = value if isinstance(value, list) else [value]
        if ids := tuple(item for item in values if type(item) is int and item >= 0):
            return ids
    return ()


def _unreadable(folder: Path, got: str) -> CheckpointError:
    return CheckpointError(
        explain(
            "Cannot load the model's tokenizer",
            expected="tokenizer.json and tokenizer_config.json",
            got=got,
            where=str(folder),
            next_step="Copy the tokenizer's files into the model folder",
        )
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
