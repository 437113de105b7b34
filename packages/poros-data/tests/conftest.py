"""A tiny byte-level tokenizer with ChatML specials, two small templates, and a writer of JSON Lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# Written for these tests: the turns of ChatML, with the default system prompt that Qwen2.5 and SmolLM2 bring along.
CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Written for these tests: what Qwen3 does to reasoning. Earlier turns lose it, the last turn gets a block of its own.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}"
    "{% set reasoning = m.reasoning_content or (parts[0].split('<think>')[-1] if parts | length > 1 else '') %}"
    "{% if loop.last %}<think>\n{{ reasoning.strip() }}\n</think>\n\n{% endif %}{{ parts[-1].lstrip() }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

CORPUS = ["The quick brown fox says: what is the capital of France? Paris, of course.\n", "2+2? 4\n\nx y z\n"]


def build_tokenizer(template: str | None = CHATML, **kwargs: Any) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of about 300 tokens; ``kwargs`` go to the wrapper (``bos_token``, ...)."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS, trainer)
    wrapper = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", **kwargs}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **wrapper)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    return build_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="session")
def thinking_tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(THINKING)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes rows (objects as JSON Lines, bytes as they are) and returns the path."""

    def write_rows(*rows: Any) -> Path:
        path = tmp_path / "data.jsonl"
        raw = [row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows]
        path.write_bytes(b"".join(raw))
        return path

    return write_rows


@pytest.fixture(scope="session")
def supervised() -> Callable[..., list[str]]:
    """Return a function that decodes every supervised stretch of a row."""

    def stretches(tokenizer: Any, row: Any) -> list[str]:
        found: list[list[int]] = []
        for position, label in enumerate(row.labels):
            if label == -100:
                continue
            assert label == row.input_ids[position]
            if position == 0 or row.labels[position - 1] == -100:
                found.append([])
            found[-1].append(label)
        return [tokenizer.decode(ids) for ids in found]

    return stretches
