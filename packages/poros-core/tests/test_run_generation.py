"""Greedy answers through the engine, and the streamed-against-resident check on a user's model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import poros
from poros.engine.engine import Engine
from poros.run.generation import generate
from poros.run.residency_check import compare_residencies

PROMPT = (3, 9, 27, 33, 5)
CPU = torch.device("cpu")


@pytest.fixture
def engine(tiny_model: Path) -> Engine:
    """bf16 weights in float32 compute: exactly the checkpoint's values."""
    numerics = poros.Numerics(
        compute_dtype=torch.float32, length_bucket=4, loss_chunk_positions=4, storage_dtype=torch.float32
    )
    with pytest.warns(UserWarning, match="EXPERIMENTAL"):
        model = poros.open_model(tiny_model, quantization="bf16_bitwise", numerics=numerics)
    return model.load(plan=poros.Plan(num_slots=2), device=CPU, seed=0)


def greedy(folder: Path, num_tokens: int) -> list[int]:
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = list(PROMPT)
    for _ in range(num_tokens):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def test_the_engine_answers_as_transformers_does(engine: Engine, tiny_model: Path) -> None:
    assert generate(engine, PROMPT, max_new_tokens=6, stop_ids=()) == greedy(tiny_model, 6)


def test_a_stop_token_ends_the_answer_and_is_left_out(engine: Engine) -> None:
    free = generate(engine, PROMPT, max_new_tokens=6, stop_ids=())
    stop = free[3]
    assert generate(engine, PROMPT, max_new_tokens=6, stop_ids={stop}) == free[: free.index(stop)]


def test_generating_counts_for_no_training_step(engine: Engine) -> None:
    generate(engine, PROMPT, max_new_tokens=2, stop_ids=())
    assert engine.take_statistics().h2d_bytes == 0


def test_streamed_and_resident_are_equal_on_the_users_model(tiny_model: Path, make_steps: Any) -> None:
    model = poros.open_model(tiny_model, lora=poros.LoraSettings(rank=4, dropout=0.3))
    verdict = compare_residencies(
        model,
        make_steps(epochs=1),
        num_steps=2,
        device=CPU,
        seed=3,
        optimizer=poros.OptimizerSettings(),
        streamed=poros.Plan(num_slots=2),
    )
    assert (verdict.outcome, verdict.detail) == ("equal", "")


def test_a_run_that_does_not_repeat_itself_cannot_be_compared(
    tiny_model: Path, make_steps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine.step
    calls = iter(range(100))

    def wandering(self: Engine, micro_batches: Any, index: int) -> Any:
        output = step(self, micro_batches, index)
        self.model.bank.gradients["lora_B"][0] += next(calls)
        return output

    monkeypatch.setattr(Engine, "step", wandering)
    verdict = compare_residencies(
        poros.open_model(tiny_model),
        make_steps(epochs=1),
        num_steps=1,
        device=CPU,
        seed=3,
        optimizer=poros.OptimizerSettings(),
    )
    assert verdict.outcome == "cannot compare"
    assert "two streamed runs differ" in verdict.detail
