"""Case 3: neither padding nor what stands beside a row changes its loss or the step's gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from poros.determinism import configure
from poros.run import open_model
from poros.settings import LoraSettings, Numerics, Plan
from poros_cli.tokenizer import load_tokenizer
from poros_data import Row, StepPlan, load_dataset, padding_id

CPU = torch.device("cpu")
# Float32 sums over other shapes; relative. Measured 2026-11-30 (x86-64 CPU, torch 2.15): loss 3.1e-8, gradients 2.7e-7.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-6, 1e-5


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, saved_model: Path) -> tuple[list[Row], int]:
    """Four rows with 2 to about 200 supervised tokens; the tokenizer pads with its end-of-turn token."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    answers = ["", "w " * 100, "yes", "a few words " * 5]
    path.write_text("".join(json.dumps({"instruction": "Say", "output": a}) + "\n" for a in answers))
    tokenizer = load_tokenizer(saved_model)
    assert padding_id(tokenizer) == tokenizer.eos_token_id
    return list(load_dataset(path, tokenizer, max_length=512).rows), padding_id(tokenizer)


def step(model: Path, rows: tuple[list[Row], int], **batching: int) -> tuple[float, torch.Tensor, int]:
    """Return loss, gradients and denominator of one optimizer step over all rows."""
    configure(CPU)
    numerics = Numerics(compute_dtype=torch.float32, length_bucket=batching["length_bucket"])
    opened = open_model(model, lora=LoraSettings(rank=2), numerics=numerics)
    engine = opened.load(plan=Plan(num_slots=2), device=CPU, seed=0)
    bank = engine.model.bank
    bank.weights["lora_B"].normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    plan = StepPlan(rows[0], pad_id=rows[1], seed=0, num_epochs=1, order="file", **batching)
    assert plan.num_steps == 1
    output = engine.step(plan.step(0), 0)
    engine.close()
    return (
        float(torch.stack(output.losses).double().sum()),
        torch.cat([gradient.flatten() for gradient in bank.gradients.values()]),
        output.supervised_tokens,
    )


@pytest.fixture(scope="module")
def alone(saved_model: Path, rows: tuple[list[Row], int]) -> tuple[float, torch.Tensor, int]:
    """The step with every row by itself, without padding."""
    return step(saved_model, rows, micro_batch_size=1, micro_batches_per_step=4, length_bucket=1)


@pytest.mark.parametrize(
    "batching",
    [
        {"micro_batch_size": 1, "micro_batches_per_step": 4, "length_bucket": 256},
        {"micro_batch_size": 4, "micro_batches_per_step": 1, "length_bucket": 1},
        {"micro_batch_size": 2, "micro_batches_per_step": 2, "length_bucket": 64},
        {"micro_batch_size": 1, "micro_batches_per_step": 4, "length_bucket": 1, "packed_length": 512},
    ],
    ids=["padded far", "all together", "in pairs", "packed"],
)
def test_padding_and_grouping_do_not_change_a_step(
    saved_model: Path,
    rows: tuple[list[Row], int],
    alone: tuple[float, torch.Tensor, int],
    batching: dict[str, int],
) -> None:
    loss, gradients, denominator = alone
    other_loss, other_gradients, other_denominator = step(saved_model, rows, **batching)
    assert other_denominator == denominator
    assert abs(other_loss - loss) <= LOSS_TOLERANCE * abs(loss)
    assert (other_gradients - gradients).abs().max() <= GRADIENT_TOLERANCE * gradients.abs().max()
