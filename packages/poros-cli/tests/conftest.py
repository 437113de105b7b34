"""A tiny checkpoint with a tokenizer and a chat template, and rows to train on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-block random Qwen2 with a byte-level tokenizer; never written to."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
    )
    folder = tmp_path_factory.mktemp("saved") / "model"
    # Several shards, so that an index is written.
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def model(saved_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(saved_model, tmp_path / "model"))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Twelve instruction rows."""
    path = tmp_path / "rows.jsonl"
    lines = [{"instruction": f"Say {index}", "output": f"Number {index}."} for index in range(12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def device(tier: str) -> str:
    """What ``--device`` of a run is in this tier."""
    return "cuda" if tier == "gpu" else "cpu"
