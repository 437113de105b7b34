"""The plugin computes what Transformers does: the question that no gate of Poros answers for a third party."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from poros import LoraSettings, Numerics, Plan, open_model

# A few float32 roundings of a loss of 5.6 (spacing 4.8e-7), where a machine sums in another order. Measured on an
# x86-64 CPU with torch 2.15: 0.0.
TOLERANCE = 5e-6


@pytest.mark.filterwarnings("ignore:Architecture `llama`:UserWarning", "ignore:EXPERIMENTAL:UserWarning")
def test_streamed_losses_are_those_of_transformers(model: Path, steps: Any) -> None:
    from transformers import AutoModelForCausalLM

    # bf16_bitwise keeps the checkpoint's own weights; new adapters add zero.
    opened = open_model(
        model,
        quantization="bf16_bitwise",
        lora=LoraSettings(rank=4),
        numerics=Numerics(compute_dtype=torch.float32),
    )
    engine = opened.load(plan=Plan(num_slots=2), device=torch.device("cpu"), seed=0)
    batches = steps.step(0)
    try:
        streamed = torch.stack(engine.step(batches, 0).losses).sum()
    finally:
        engine.close()
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = [stock(batch.input_ids).logits[:, :-1].flatten(0, 1) for batch in batches]
    targets = torch.cat([batch.labels[:, 1:].flatten() for batch in batches])
    expected = F.cross_entropy(torch.cat(logits), targets)
    assert abs(float(streamed - expected)) < TOLERANCE
