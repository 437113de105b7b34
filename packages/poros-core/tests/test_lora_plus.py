"""LoRA+: PEFT's own optimizer on the unpatched loop agrees, and no plan changes a bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import poros
from poros.interfaces import ParityCase
from poros.parity import gates
from poros.parity.pytest_gates import FLOAT32_TOLERANCE
from poros.plugins import Registry
from poros.settings import Plan

RATIO = 16.0


@pytest.fixture
def case(tiny_case: ParityCase) -> ParityCase:
    return replace(tiny_case, name="tiny-lora-plus", optimizer={"lora_plus_ratio": RATIO})


def test_peft_s_optimizer_on_the_unpatched_loop_agrees(
    case: ParityCase, registry: Registry, cpu: torch.device
) -> None:
    exact = replace(case, compute_dtype=torch.float32, num_steps=3)
    found = gates.reference(exact, registry, cpu)
    assert found.max_loss_difference <= FLOAT32_TOLERANCE, found
    # A rate that is 16 times as high moves lora_B, and its rounding, 16 times as far.
    assert found.max_weight_difference <= RATIO * FLOAT32_TOLERANCE, found
    one_rate = gates.reference(replace(exact, optimizer={}), registry, cpu)
    assert one_rate.max_weight_difference <= FLOAT32_TOLERANCE, one_rate


def test_streaming_changes_no_bit_of_the_resident_run(
    case: ParityCase, registry: Registry, cpu: torch.device
) -> None:
    for verdict in gates.residency(case, gates.Oracles(registry, cpu), gates.STREAMED_PLANS[3:]):
        assert verdict.outcome == "equal", verdict.detail


def test_the_rate_in_the_metrics_is_that_of_lora_a_and_another_ratio_is_listed(
    make_trainer: Callable[..., poros.Trainer], make_steps: Any, tmp_path: Path
) -> None:
    def optimizer(ratio: float) -> poros.OptimizerSettings:
        return poros.OptimizerSettings(learning_rate=1e-3, schedule="constant", lora_plus_ratio=ratio)

    steps, plan = make_steps(epochs=1), Plan(num_slots=2)
    with make_trainer(tmp_path, steps=steps, plan=plan, optimizer=optimizer(RATIO)) as trainer:
        trainer.run()
    assert '"learning_rate": 0.001' in (tmp_path / "metrics.jsonl").read_text()
    with make_trainer(tmp_path, steps=steps, plan=plan, optimizer=optimizer(4.0), resume=True) as trainer:
        assert any("optimizer.lora_plus_ratio: 16.0 -> 4.0" in note for note in trainer.notes)
