"""Train a tiny NF4 model from Python with poros-core and poros-arch-qwen alone: no data package, no command line.

Usage: python examples/tiny_python.py OUTPUT_FOLDER
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import poros


@dataclass
class Batch:
    """Three rows of a counting sequence; every token but the first is supervised."""

    input_ids: torch.Tensor
    labels: torch.Tensor


class Counting:
    """The same two micro-batches in every step."""

    num_steps = 12
    fingerprint = "counting"

    def step(self, index: int) -> list[Batch]:
        """Return the micro-batches of step ``index``."""
        rows = [(torch.arange(16)[None] + torch.arange(3)[:, None] * start) % 64 for start in (1, 5)]
        return [Batch(ids, ids.clone()) for ids in rows]


def make_model(folder: Path) -> Path:
    """Save a tiny random Qwen2 checkpoint."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def main(output: str) -> None:
    """Train, streamed on the CPU, and check that the loss fell."""
    with tempfile.TemporaryDirectory() as folder:
        model = poros.open_model(make_model(Path(folder) / "model"), lora=poros.LoraSettings(rank=8))
        settings = poros.RunSettings(
            output=output, device="cpu", optimizer=poros.OptimizerSettings(learning_rate=5e-3)
        )
        with poros.Trainer(model, Counting(), settings) as trainer:
            result = trainer.run()
    assert result.first_loss is not None
    assert result.last_loss is not None
    assert result.last_loss < result.first_loss, (result.first_loss, result.last_loss)
    print(f"loss {result.first_loss:.4f} -> {result.last_loss:.4f}, adapter in {result.adapter}")


if __name__ == "__main__":
    main(sys.argv[1])
