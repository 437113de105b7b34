"""What evaluations decide, which must not depend on interruptions: early stop, best checkpoint, final adapter."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import poros
from poros.checkpoint import checkpoint_folder, load_adapter, load_run_state
from poros.errors import CheckpointError, ConfigError, NonFiniteError
from poros.run import EvalEvent, RunResult, StepEvent
from poros.run.checkpointing import weights_of
from poros.run.evaluating import evaluate_rows
from poros.run.selection import Selection

Make = Callable[..., poros.Trainer]
# After these steps; the best is neither the first nor the last.
LOSSES = {1: 3.0, 2: 2.0, 3: 2.5, 4: 2.5, 5: 2.4, 6: 2.3}


class StopAfter(poros.Reporter):
    def __init__(self, step: int) -> None:
        self.step = step
        self.trainer: poros.Trainer | None = None

    def on_step(self, event: StepEvent) -> None:
        if event.step == self.step and self.trainer is not None:
            self.trainer.request_stop()


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[int, float]], None]:
    """Let evaluations of given steps have given losses."""

    def script(losses: Mapping[int, float]) -> None:
        def evaluated(*_: Any, step: int, stopping: Callable[[], bool], **__: Any) -> EvalEvent | None:
            if stopping():
                return None
            return EvalEvent(
                step=step,
                eval_loss=losses[step],
                eval_perplexity=None,
                eval_supervised_tokens=1,
                eval_seconds=0.0,
            )

        monkeypatch.setattr("poros.run.trainer.evaluate_rows", evaluated)

    return script


@pytest.fixture
def train(make_trainer: Make, make_steps: Any) -> Callable[..., RunResult]:
    """Train six steps of one short row, evaluating after each; ``stop`` interrupts after a step."""

    def trained(output: Path, *, stop: int | None = None, **settings: Any) -> RunResult:
        steps = make_steps(num_rows=6, accumulation=1, epochs=1)
        stopper = StopAfter(stop or 0)
        usual = {"eval_every": 1, "evaluation": (steps.row(100),), "keep_checkpoints": 1}
        with make_trainer(output, steps=steps, reporters=(stopper,), **{**usual, **settings}) as trainer:
            stopper.trainer = trainer
            return trainer.run()

    return trained


def checkpoints(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir())


def adapter(output: Path) -> dict[str, torch.Tensor]:
    return load_adapter(output / "adapter")[1]


def equal(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


def test_the_lowest_loss_is_the_best_and_of_equal_ones_the_first() -> None:
    selection = Selection(rows="")
    assert [selection.add(step, loss, 0.0) for step, loss in enumerate([2.0, 1.0, 1.0, 3.0])] == [
        True,
        True,
        False,
        False,
    ]
    assert (selection.best_step, selection.best_loss) == (1, 1.0)


def test_an_improvement_within_the_minimal_delta_is_stale_and_still_the_best() -> None:
    selection = Selection(rows="")
    for step, loss in enumerate([2.0, 1.95, 1.9, 1.85]):
        selection.add(step, loss, 0.1)
    # 1.85 is lower than 2.0 by more than the delta, 1.9 is not
    assert (selection.stale, selection.reference_loss, selection.best_loss) == (0, 1.85, 1.85)


def test_a_run_stops_once_patience_is_exhausted(
    train: Callable[..., RunResult], scripted: Any, tmp_path: Path
) -> None:
    scripted(LOSSES)
    result = train(tmp_path, early_stop_patience=2)
    assert (result.steps, result.stopped_early, result.interrupted) == (4, True, False)
    assert (result.best_step, result.best_eval_loss, result.adapter_step) == (2, 2.0, 4)
    recorded = json.loads((tmp_path / "run.json").read_text())["result"]
    assert (recorded["stopped_early"], recorded["adapter_step"]) == (True, 4)
    assert checkpoints(tmp_path) == ["step-000004"]


@pytest.mark.parametrize("stop", [2, 4])
def test_an_interruption_changes_no_decision(
    train: Callable[..., RunResult], scripted: Any, tmp_path: Path, stop: int
) -> None:
    scripted(LOSSES)
    settings = {"early_stop_patience": 2, "keep_best": True}
    whole = train(tmp_path / "whole", **settings)
    assert train(tmp_path / "parts", stop=stop, **settings).interrupted
    parts = train(tmp_path / "parts", resume=True, **settings)
    for name in ("steps", "stopped_early", "best_step", "best_eval_loss", "adapter_step", "eval_loss"):
        assert getattr(parts, name) == getattr(whole, name), name
    assert equal(adapter(tmp_path / "whole"), adapter(tmp_path / "parts"))
    for name in ("best.json", "metrics.jsonl"):
        told = [(tmp_path / run / name).read_text().splitlines() for run in ("whole", "parts")]
        if name == "metrics.jsonl":
            told = [[line for line in lines if "eval_loss" in line] for lines in told]
        assert told[0] == told[1]


def test_the_best_checkpoint_is_kept_named_and_the_final_adapter(
    train: Callable[..., RunResult], scripted: Any, tmp_path: Path
) -> None:
    scripted(LOSSES)
    result = train(tmp_path, keep_best=True)
    assert (result.steps, result.adapter_step) == (6, 2)
    assert checkpoints(tmp_path) == ["step-000002", "step-000006"]
    best = json.loads((tmp_path / "best.json").read_text())
    assert best == {"step": 2, "eval_loss": 2.0, "checkpoint": "checkpoints/step-000002"}
    saved = adapter(tmp_path)
    state = load_run_state(tmp_path / best["checkpoint"]).tensors["weights.lora_B"]
    assert sum(tensor.float().abs().sum() for name, tensor in saved.items() if "lora_B" in name).item() == (
        pytest.approx(state.abs().sum().item())
    )


def test_the_final_adapter_is_the_last_one_without_keep_best(
    train: Callable[..., RunResult], scripted: Any, tmp_path: Path
) -> None:
    scripted(LOSSES)
    train(tmp_path / "last")
    train(tmp_path / "best", keep_best=True)
    assert not (tmp_path / "last" / "best.json").exists()
    assert not equal(adapter(tmp_path / "last"), adapter(tmp_path / "best"))


def test_the_engine_holds_the_last_weights_after_the_best_were_lent(
    make_trainer: Make, make_steps: Any, scripted: Any, tmp_path: Path
) -> None:
    scripted(LOSSES)
    steps = make_steps(num_rows=6, accumulation=1, epochs=1)
    settings = {"evaluation": (steps.row(100),), "eval_every": 1, "keep_best": True}
    with make_trainer(tmp_path, steps=steps, **settings) as trainer:
        trainer.run()
        last = load_run_state(checkpoint_folder(tmp_path, 6)).tensors
        for group, weights in trainer.engine.model.bank.weights.items():
            assert torch.equal(weights, last[f"weights.{group}"])


def test_a_best_checkpoint_that_cannot_be_read_says_how_to_get_the_last_adapter(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=r"best checkpoint cannot be read.*`keep_best: false`"),
        weights_of(tmp_path / "nothing", None),  # type: ignore[arg-type]
    ):
        raise AssertionError("not reached")


def test_a_run_that_stopped_early_goes_on_with_more_patience(
    train: Callable[..., RunResult], scripted: Any, tmp_path: Path
) -> None:
    scripted(LOSSES)
    assert train(tmp_path, early_stop_patience=2).steps == 4
    again = train(tmp_path, early_stop_patience=2, resume=True)
    assert (again.steps, again.stopped_early) == (4, True)
    assert train(tmp_path, early_stop_patience=4, resume=True).steps == 6


def test_a_best_checkpoint_that_is_gone_is_said_and_best_begins_anew(
    train: Callable[..., RunResult], make_trainer: Make, make_steps: Any, scripted: Any, tmp_path: Path
) -> None:
    scripted(LOSSES)
    train(tmp_path, stop=4, keep_best=True)
    (checkpoint_folder(tmp_path, 2) / "state.json").unlink()
    steps = make_steps(num_rows=6, accumulation=1, epochs=1)
    settings = {"eval_every": 1, "keep_best": True, "resume": True}
    with make_trainer(tmp_path, steps=steps, evaluation=(steps.row(100),), **settings) as trainer:
        assert any("best begins anew" in note for note in trainer.notes)
        assert trainer.run().best_step == 6


def test_other_held_out_rows_begin_the_choice_anew(
    train: Callable[..., RunResult], make_steps: Any, scripted: Any, tmp_path: Path
) -> None:
    scripted(LOSSES)
    train(tmp_path, stop=3)
    result = train(tmp_path, resume=True, evaluation=(make_steps().row(101),))
    assert result.best_step == 6
    assert any("held-out rows changed" in n for n in json.loads((tmp_path / "run.json").read_text())["notes"])


def test_evaluation_with_dropout_changes_neither_weights_nor_moments_nor_generator(
    make_trainer: Make, make_steps: Any, tmp_path: Path
) -> None:
    steps = make_steps(num_rows=6, accumulation=2, epochs=1)
    rows = tuple(steps.row(index) for index in (100, 101))
    for name, settings in (("plain", {}), ("evaluated", {"evaluation": rows, "eval_every": 1})):
        torch.manual_seed(3)
        with make_trainer(tmp_path / name, steps=steps, **settings) as trainer:
            trainer.run()
    first, second = (
        load_run_state(checkpoint_folder(tmp_path / n, 3)).tensors for n in ("plain", "evaluated")
    )
    assert equal(first, second)


def test_an_evaluation_by_hand_is_made_after_an_interruption_too(
    make_trainer: Make, make_steps: Any, tmp_path: Path
) -> None:
    stopper = StopAfter(1)
    rows = (make_steps().row(3),)
    with make_trainer(tmp_path, evaluation=rows, reporters=(stopper,)) as trainer:
        stopper.trainer = trainer
        assert trainer.run().interrupted
        assert trainer.evaluate() is not None


def test_perplexity_is_beside_the_loss(make_trainer: Make, make_steps: Any, tmp_path: Path) -> None:
    with make_trainer(tmp_path, evaluation=(make_steps().row(3),)) as trainer:
        event = trainer.evaluate()
    assert event is not None
    assert event.eval_perplexity == pytest.approx(torch.tensor(event.eval_loss).double().exp().item())


def test_a_held_out_loss_that_is_not_finite_ends_the_run(make_steps: Any) -> None:
    class Engine:
        def evaluate(self, rows: Any) -> tuple[float, int]:
            return float("nan"), 3

        def take_statistics(self) -> None: ...

    with pytest.raises(NonFiniteError, match="held-out loss after step 7 is not finite"):
        evaluate_rows(
            Engine(),  # type: ignore[arg-type]
            [make_steps().row(3)],
            step=7,
            max_positions=100,
            checkpoint=None,
            stopping=lambda: False,
        )


@pytest.mark.parametrize("setting", [{"keep_best": True}, {"early_stop_patience": 1}])
def test_a_choice_without_evaluations_is_refused(
    make_trainer: Make, tmp_path: Path, setting: dict[str, Any]
) -> None:
    (name,) = setting
    with pytest.raises(ConfigError, match=f"`{name}`: expected `eval_every`"):
        make_trainer(tmp_path, **setting)
    with pytest.raises(ConfigError, match=f"`{name}`: expected held-out rows"):
        make_trainer(tmp_path, eval_every=1, **setting)
