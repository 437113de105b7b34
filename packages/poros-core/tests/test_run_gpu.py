"""Whole runs on a CUDA device: resume, residency, evaluation, memory reports, answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import poros
from poros.checkpoint import load_run_state, newest_complete
from poros.run import StepEvent
from poros.run.generation import generate

pytestmark = pytest.mark.gpu

Make = Callable[..., poros.Trainer]
PLANS = (
    poros.Plan(num_slots=2),
    poros.Plan(num_slots=2, workspace=True),
    poros.Plan(num_slots=2, pin_host_memory=False),
    poros.Plan(residency="resident"),
    poros.Plan(num_slots=2, order="micro-batch-major"),
)


class StopAfter(poros.Reporter):
    def __init__(self, step: int) -> None:
        self.step = step
        self.trainer: poros.Trainer | None = None

    def on_step(self, event: StepEvent) -> None:
        if event.step == self.step and self.trainer is not None:
            self.trainer.request_stop()


def state(output: Path) -> dict[str, torch.Tensor]:
    path, _ = newest_complete(output)
    assert path is not None
    return dict(load_run_state(path).tensors)


def run(make_trainer: Make, output: Path, **settings: Any) -> poros.RunResult:
    with make_trainer(output, **{"device": "cuda", **settings}) as trainer:
        return trainer.run()


def test_no_plan_changes_a_bit_and_a_resumed_run_is_the_uninterrupted_one(
    make_trainer: Make, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    run(make_trainer, tmp_path / "whole", plan=PLANS[0])
    expected = state(tmp_path / "whole")
    assert "generator.cuda" in expected
    for number, plan in enumerate(PLANS):
        stop = StopAfter(5)
        output = tmp_path / str(number)
        torch.manual_seed(0)
        with make_trainer(output, device="cuda", plan=plan, reporters=(stop,)) as trainer:
            stop.trainer = trainer
            assert trainer.run().interrupted
        torch.manual_seed(number + 1)
        assert run(make_trainer, output, plan=plan, resume=True).steps == 12
        found = state(output)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), plan


def test_evaluation_and_answers_between_steps_change_no_bit(
    make_trainer: Make, make_steps: Any, tmp_path: Path
) -> None:
    steps = make_steps(epochs=1)
    torch.manual_seed(0)
    run(make_trainer, tmp_path / "plain", steps=steps, plan=PLANS[0])
    held_out = tuple(steps.row(index) for index in range(100, 105))
    torch.manual_seed(0)
    with make_trainer(
        tmp_path / "looked at",
        steps=steps,
        device="cuda",
        plan=PLANS[0],
        evaluation=held_out,
        eval_every=2,
    ) as trainer:
        assert len(generate(trainer.load(), (3, 9, 27), max_new_tokens=4, stop_ids=())) == 4
        trainer.run()
    plain, looked_at = state(tmp_path / "plain"), state(tmp_path / "looked at")
    assert all(torch.equal(looked_at[name], tensor) for name, tensor in plain.items())


def test_metrics_report_device_memory_and_traffic(
    make_trainer: Make, make_steps: Any, tmp_path: Path
) -> None:
    # Both blocks would be in their slots after a warm-up.
    result = run(make_trainer, tmp_path, steps=make_steps(epochs=1), plan=PLANS[0], warm_up=False)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(line["peak_device_bytes"] > 0 for line in lines)
    assert lines[0]["h2d_bytes"] > 0
    assert all(line["exposed_copy_seconds"] >= 0 for line in lines)
    assert result.peak_device_bytes == max(line["peak_device_bytes"] for line in lines)


def test_a_run_takes_exactly_the_device_that_was_asked_for(make_trainer: Make, tmp_path: Path) -> None:
    last = torch.cuda.device_count() - 1
    with make_trainer(tmp_path, device=f"cuda:{last}") as trainer:
        engine = trainer.load()
    assert str(engine.device) == f"cuda:{last}"
    assert {w.device.index for w in engine.model.bank.weights.values()} == {last}
