"""A tiny Llama checkpoint, rows for it, and the `poros` command of this environment."""

from __future__ import annotations

import json
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

# Tiny kernels on few cores: a pool of spinning threads costs more than it computes.
torch.set_num_threads(1)

Command = Callable[..., subprocess.CompletedProcess[str]]

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class Batch:
    """One micro-batch; every token but each row's first is supervised."""

    input_ids: torch.Tensor
    labels: torch.Tensor


class Counting:
    """Steps of two unequal micro-batches of counting sequences."""

    num_steps = 3
    fingerprint = "counting"

    def step(self, index: int) -> list[Batch]:
        """Return the micro-batches of step ``index``."""
        rows = [torch.arange(12)[None] + torch.tensor([[1], [40]]), torch.arange(7)[None] + 20 + index]
        return [Batch(ids, ids.clone()) for ids in rows]


@pytest.fixture(scope="session")
def poros() -> Command:
    """Run the installed command in a process of its own, as a user does."""
    script = Path(sysconfig.get_path("scripts")) / "poros"

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(script), *map(str, arguments)], capture_output=True, text=True, timeout=500, check=False
        )

    return run


@pytest.fixture(scope="session")
def steps() -> Counting:
    """Token ids below 64: both the tiny and the real model have them."""
    return Counting()


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight instruction rows."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    lines = [{"instruction": f"Say {index}", "output": f"Number {index}."} for index in range(8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random three-block Llama with a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("saved") / "tiny-llama"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
