"""A resumed run is the uninterrupted run, bit for bit; a changed one is refused or announced."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import poros
from poros.checkpoint import load_run_state, newest_complete
from poros.errors import ConfigError, OutputError
from poros.run import StepEvent

# 23 rows, 4 micro-batches a step, 2 epochs: 12 steps, the epoch border after step 6.
STOPS = (5, 6, 7)


class StopAfter(poros.Reporter):
    """Asks for a clean stop like the first Ctrl-C does."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.trainer: poros.Trainer | None = None

    def on_step(self, event: StepEvent) -> None:
        if event.step == self.step and self.trainer is not None:
            self.trainer.request_stop()


def interrupted(make_trainer: Callable[..., poros.Trainer], output: Path, step: int, **settings: Any) -> None:
    stop = StopAfter(step)
    with make_trainer(output, reporters=(stop,), **settings) as trainer:
        stop.trainer = trainer
        result = trainer.run()
    assert result.interrupted
    assert result.steps == step


def final_state(output: Path) -> dict[str, torch.Tensor]:
    path, _ = newest_complete(output)
    assert path is not None
    return dict(load_run_state(path).tensors)


def losses(output: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["learning_rate"]) for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uninterrupted") / "run"


@pytest.mark.parametrize("stop", STOPS)
def test_an_interrupted_and_resumed_run_is_bitwise_the_uninterrupted_one(
    make_trainer: Callable[..., poros.Trainer], tmp_path: Path, uninterrupted: Path, stop: int
) -> None:
    if not uninterrupted.exists():
        with make_trainer(uninterrupted) as trainer:
            assert trainer.run().steps == 12
    interrupted(make_trainer, tmp_path / "run", stop)
    torch.manual_seed(stop)  # a fresh process has another generator state
    with make_trainer(tmp_path / "run", resume=True) as trainer:
        assert trainer.run().steps == 12
    assert losses(tmp_path / "run") == losses(uninterrupted)
    expected, found = final_state(uninterrupted), final_state(tmp_path / "run")
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        if not name.startswith("generator"):  # seeded differently on purpose above
            assert torch.equal(found[name], tensor), name


def test_the_generator_continues_from_the_checkpoint(
    make_trainer: Callable[..., poros.Trainer], tmp_path: Path
) -> None:
    interrupted(make_trainer, tmp_path, 2)
    before = final_state(tmp_path)["generator.cpu"]
    torch.manual_seed(99)
    with make_trainer(tmp_path, resume=True) as trainer:
        trainer.load()
        assert torch.equal(torch.get_rng_state(), before)


def test_another_plan_may_continue_a_run_and_changes_no_bit(
    make_trainer: Callable[..., poros.Trainer], tmp_path: Path
) -> None:
    with make_trainer(tmp_path / "one", plan=poros.Plan(num_slots=2)) as trainer:
        trainer.run()
    interrupted(make_trainer, tmp_path / "two", 5, plan=poros.Plan(residency="resident"))
    plan = poros.Plan(num_slots=3, order="micro-batch-major")
    with make_trainer(tmp_path / "two", resume=True, plan=plan) as trainer:
        assert not any("changed settings" in note for note in trainer.notes)
        trainer.run()
    one, two = final_state(tmp_path / "one"), final_state(tmp_path / "two")
    assert all(torch.equal(one[name], two[name]) for name in one if not name.startswith("generator"))


@pytest.mark.parametrize(
    ("change", "listed"),
    [
        ({"lora": poros.LoraSettings(rank=8, dropout=0.3)}, "lora.rank: 4 -> 8"),
        ({"lora": poros.LoraSettings(rank=4, dropout=0.3, targets=("q_proj",))}, "lora.targets: "),
        ({"lora": poros.LoraSettings(rank=4, dropout=0.3, blocks=(1,))}, r"lora.blocks: None -> \[1\]"),
        ({"seed": 1}, "seed: 0 -> 1"),
        ({"quantization": "bf16_bitwise"}, "quantization: nf4"),
        ({"data_record": {"file": "new"}}, "data.file: old -> new"),
    ],
)
@pytest.mark.filterwarnings("ignore:EXPERIMENTAL")
def test_a_change_of_model_adapter_data_or_seed_is_refused_with_old_and_new(
    make_trainer: Callable[..., poros.Trainer], tmp_path: Path, change: dict[str, Any], listed: str
) -> None:
    interrupted(make_trainer, tmp_path, 1, data_record={"file": "old"})
    before = final_state(tmp_path)
    with pytest.raises(ConfigError, match=listed):
        make_trainer(tmp_path, **{"resume": True, "data_record": {"file": "old"}, **change})
    assert set(final_state(tmp_path)) == set(before)


def test_other_data_is_refused(
    make_trainer: Callable[..., poros.Trainer], make_steps: Any, tmp_path: Path
) -> None:
    interrupted(make_trainer, tmp_path, 1)
    with pytest.raises(ConfigError, match=r"data\.steps: rows-23-4 -> rows-22-4"):
        make_trainer(tmp_path, resume=True, steps=make_steps(num_rows=22))


def test_a_changed_learning_rate_is_announced(
    make_trainer: Callable[..., poros.Trainer], tmp_path: Path
) -> None:
    interrupted(make_trainer, tmp_path, 1)
    optimizer = poros.OptimizerSettings(learning_rate=5e-3)
    with make_trainer(tmp_path, resume=True, optimizer=optimizer) as trainer:
        assert any("optimizer.learning_rate: 0.01 -> 0.005" in note for note in trainer.notes)


@pytest.mark.parametrize(
    ("change", "listed"),
    [
        ({"numerics": poros.Numerics(neftune_alpha=5.0)}, "numerics.neftune_alpha: 0.0 -> 5.0"),
        (
            {"optimizer": poros.OptimizerSettings(learning_rate=1e-2, max_grad_norm=0.5)},
            "optimizer.max_grad_norm: 1.0 -> 0.5",
        ),
        ({"eval_every": 2, "early_stop_patience": 3}, "selection.early_stop_patience: None -> 3"),
        ({"eval_every": 2, "keep_best": True}, "selection.keep_best: None -> True"),
    ],
)
def test_a_change_of_numerics_optimizer_or_choice_among_evaluations_is_announced(
    make_trainer: Callable[..., poros.Trainer],
    make_steps: Any,
    tmp_path: Path,
    change: dict[str, Any],
    listed: str,
) -> None:
    interrupted(make_trainer, tmp_path, 1)
    rows = (make_steps().row(30),)
    with make_trainer(tmp_path, resume=True, evaluation=rows, **change) as trainer:
        assert listed in " ".join(trainer.notes)


def test_every_setting_of_adapter_numerics_and_optimizer_is_in_the_fingerprint(
    make_trainer: Callable[..., poros.Trainer], tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path)
    sections = {
        "lora": trainer.model.lora,
        "numerics": poros.Numerics(),
        "optimizer": poros.OptimizerSettings(),
    }
    for section, settings in sections.items():
        for field in dataclasses.fields(settings):
            if getattr(settings, field.name) != {}:  # a mapping is there by its entries
                assert f"{section}.{field.name}" in trainer.fingerprint


def test_a_resumed_run_sweeps_what_was_left_and_prunes_what_the_killed_one_could_not(
    make_trainer: Callable[..., poros.Trainer], make_steps: Any, tmp_path: Path
) -> None:
    with make_trainer(tmp_path, steps=make_steps(epochs=1), save_every=2, keep_checkpoints=3) as trainer:
        trainer.run()
    for name in (".dry-save.tmp-1", ".adapter.tmp-2", "checkpoints/.step-000009.tmp-3"):
        (tmp_path / name).mkdir()
    (tmp_path / ".run.json.tmp-4").write_text("{")
    with make_trainer(tmp_path, steps=make_steps(epochs=1), resume=True, keep_checkpoints=1) as trainer:
        trainer.run()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000006"]
    assert not list(tmp_path.glob(".*"))


def test_resume_without_a_checkpoint_is_refused(
    make_trainer: Callable[..., poros.Trainer], tmp_path: Path
) -> None:
    with pytest.raises(OutputError, match="expected a complete checkpoint, got none"):
        make_trainer(tmp_path, resume=True)


def test_metrics_beyond_the_checkpoint_are_dropped(
    make_trainer: Callable[..., poros.Trainer], tmp_path: Path
) -> None:
    interrupted(make_trainer, tmp_path, 2)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 3, "loss": 1.0, "learning_rate": 1.0}\n{"step": 4, "lo')
    interrupted(make_trainer, tmp_path, 4, resume=True)
    assert [step for step, _, _ in losses(tmp_path)] == [1, 2, 3, 4]
    assert losses(tmp_path)[2][1] != 1.0


def test_a_damaged_newest_checkpoint_is_skipped_and_named(
    make_trainer: Callable[..., poros.Trainer], tmp_path: Path
) -> None:
    interrupted(make_trainer, tmp_path, 3, save_every=2)
    (tmp_path / "checkpoints" / "step-000003" / "state.safetensors").write_bytes(b"short")
    with make_trainer(tmp_path, resume=True) as trainer:
        assert any("step-000003" in note for note in trainer.notes)
        assert trainer.run().steps == 12


def test_a_shorter_run_cannot_be_resumed_past_its_end(
    make_trainer: Callable[..., poros.Trainer], make_steps: Any, tmp_path: Path
) -> None:
    interrupted(make_trainer, tmp_path, 7)
    with pytest.raises(ConfigError, match="at least 7 steps, got 6"):
        make_trainer(tmp_path, resume=True, steps=make_steps(epochs=1))


def test_a_finished_run_can_be_resumed_and_only_saves_again(
    make_trainer: Callable[..., poros.Trainer], make_steps: Any, tmp_path: Path
) -> None:
    with make_trainer(tmp_path, steps=make_steps(epochs=1)) as trainer:
        trainer.run()
    with make_trainer(tmp_path, steps=make_steps(epochs=1), resume=True) as trainer:
        result = trainer.run()
    assert (result.steps, result.first_loss, result.interrupted) == (6, None, False)
