"""Whole runs on a tiny checkpoint: what they write, what they refuse, how they end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import poros
from poros.blocks.store import checksum
from poros.checkpoint import load_adapter, load_run_state, newest_complete
from poros.errors import (
    BudgetError,
    DeviceError,
    FormatError,
    NonFiniteError,
    OutputError,
    PorosError,
    UserError,
)
from poros.interfaces import MicroBatch
from poros.planning.replay import replay
from poros.run import StepEvent, WarmUpEvent
from poros.run.guards import check_first_gradients

Make = Callable[..., poros.Trainer]

METRICS = {
    "step",
    "loss",
    "learning_rate",
    "grad_norm",
    "tokens",
    "supervised_tokens",
    "seconds",
    "tokens_per_second",
    "h2d_bytes",
    "exposed_copy_seconds",
    "peak_device_bytes",
    "grown_host_bytes",
}


class OnStep(poros.Reporter):
    def __init__(self, action: Callable[[StepEvent], None]) -> None:
        self.on_step = action  # type: ignore[method-assign]


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def weights(output: Path) -> dict[str, torch.Tensor]:
    path, _ = newest_complete(output)
    assert path is not None
    return {name: t for name, t in load_run_state(path).tensors.items() if not name.startswith("generator")}


def test_a_run_writes_metrics_a_record_a_checkpoint_and_an_adapter_that_stock_peft_reads(
    make_trainer: Make, make_steps: Any, tmp_path: Path
) -> None:
    with make_trainer(tmp_path, steps=make_steps(epochs=1)) as trainer:
        result = trainer.run()
    assert [set(line) for line in lines(tmp_path)] == [METRICS] * 6
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["device"] == "CPU"
    assert record["fingerprint"]["lora.rank"] == 4
    assert "torch" in {k.rsplit(".", 1)[-1] for k in record["fingerprint"]}
    assert record["result"]["steps"] == 6
    assert result.adapter == tmp_path / "adapter"
    assert result.adapter_report is not None
    assert result.adapter_report.num_modules == 2 * 7
    config, tensors = load_adapter(tmp_path / "adapter")
    assert config.r == 4
    assert any(tensor.any() for name, tensor in tensors.items() if "lora_B" in name)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "adapter",
        "checkpoints",
        "metrics.jsonl",
        "run.json",
    ]


def test_the_loss_falls(make_trainer: Make, make_steps: Any, tmp_path: Path) -> None:
    steps = make_steps(num_rows=2, accumulation=2, epochs=20)
    with make_trainer(tmp_path, steps=steps, lora=poros.LoraSettings(rank=8)) as trainer:
        result = trainer.run()
    assert result.first_loss is not None
    assert result.last_loss is not None
    assert result.last_loss < result.first_loss


def test_the_store_is_the_same_before_and_after(make_trainer: Make, make_steps: Any, tmp_path: Path) -> None:
    with make_trainer(tmp_path, steps=make_steps(epochs=1)) as trainer:
        before = checksum(trainer.load().model.store)
        trainer.run()
        assert checksum(trainer.engine.model.store) == before


def test_a_warm_up_changes_no_bit_and_is_told(make_trainer: Make, make_steps: Any, tmp_path: Path) -> None:
    told: list[WarmUpEvent] = []

    class Listener(poros.Reporter):
        def on_warm_up(self, event: WarmUpEvent) -> None:
            told.append(event)

    steps = make_steps(epochs=1)
    for name, warm_up in (("cold", False), ("warm", True)):
        with make_trainer(tmp_path / name, steps=steps, warm_up=warm_up, reporters=(Listener(),)) as trainer:
            trainer.run()
    (event,) = told
    assert event.longest == max(batch.input_ids.shape[1] for index in range(6) for batch in steps.step(index))
    assert lines(tmp_path / "cold")[0]["h2d_bytes"] >= lines(tmp_path / "warm")[0]["h2d_bytes"]
    assert [a["loss"] for a in lines(tmp_path / "cold")] == [b["loss"] for b in lines(tmp_path / "warm")]
    cold, warm = weights(tmp_path / "cold"), weights(tmp_path / "warm")
    assert all(torch.equal(cold[name], warm[name]) for name in cold)


def test_a_resumed_run_warms_up_without_changing_a_bit(
    make_trainer: Make, make_steps: Any, tmp_path: Path
) -> None:
    steps = make_steps(epochs=1)
    with make_trainer(tmp_path / "whole", steps=steps) as trainer:
        trainer.run()
    reporter = OnStep(lambda event: trainer.request_stop() if event.step == 2 else None)
    with make_trainer(tmp_path / "split", steps=steps, reporters=(reporter,)) as trainer:
        trainer.run()
    with make_trainer(tmp_path / "split", steps=steps, resume=True, warm_up=True) as trainer:
        trainer.run()
    whole, split = weights(tmp_path / "whole"), weights(tmp_path / "split")
    assert all(torch.equal(whole[name], split[name]) for name in whole)


def test_the_record_holds_what_was_predicted_and_what_was_measured(
    make_trainer: Make, make_steps: Any, tmp_path: Path
) -> None:
    with make_trainer(tmp_path, steps=make_steps(epochs=1)) as trainer:
        result = trainer.run()
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["binding"] in ("compute", "link", "device memory", "host memory")
    assert record["predicted_step"]["seconds"] == record["result"]["predicted_step_seconds"] > 0
    assert sum(record["predicted_device_bytes"].values()) == record["result"]["predicted_device_bytes"]
    assert record["rates"]["measured"] is True
    assert record["result"]["step_seconds"] == result.step_seconds > 0
    assert record["plan"] == {f: getattr(trainer.planned.plan, f) for f in record["plan"]}


def test_the_record_holds_the_planned_timeline_that_the_prediction_was_made_from(
    make_trainer: Make, make_steps: Any, tmp_path: Path
) -> None:
    with make_trainer(tmp_path, steps=make_steps(epochs=1)) as trainer:
        trainer.run()
    record = json.loads((tmp_path / "run.json").read_text())
    played, spans = replay(record["predicted_timeline"])
    passes = record["predicted_timeline"]["passes"]
    assert passes * played.link_seconds == record["predicted_step"]["link_seconds"]
    assert 0 < passes * played.seconds < record["predicted_step"]["seconds"]
    assert sum(s.seconds for s in spans if s.lane == "compute") == pytest.approx(played.compute_seconds)
    assert max(s.start + s.seconds for s in spans) == pytest.approx(played.seconds)


def test_the_record_says_after_which_step_a_run_was_stopped_and_resumed(
    make_trainer: Make, make_steps: Any, tmp_path: Path
) -> None:
    reporter = OnStep(lambda event: trainer.request_stop() if event.step == 2 else None)
    with make_trainer(tmp_path, steps=make_steps(epochs=1), reporters=(reporter,)) as trainer:
        trainer.run()
    record = json.loads((tmp_path / "run.json").read_text())
    assert (record["first_step"], record["result"]["interrupted"], record["result"]["steps"]) == (0, True, 2)
    with make_trainer(tmp_path, steps=make_steps(epochs=1), resume=True) as trainer:
        trainer.run()
    record = json.loads((tmp_path / "run.json").read_text())
    assert (record["first_step"], record["result"]["interrupted"]) == (2, False)


def test_the_record_says_why_a_run_failed(
    make_trainer: Make, make_steps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise poros.errors.NonFiniteError("Step 1 is not finite.")

    monkeypatch.setattr("poros.run.trainer.check_step_finite", fail)
    trainer = make_trainer(tmp_path, steps=make_steps(epochs=1))
    with trainer, pytest.raises(poros.errors.NonFiniteError):
        trainer.run()
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["failure"] == "Step 1 is not finite."
    assert "result" not in record


def test_the_record_holds_what_its_caller_adds(make_trainer: Make, make_steps: Any, tmp_path: Path) -> None:
    with make_trainer(tmp_path, steps=make_steps(epochs=1), run_record={"data": {"rows": 3}}) as trainer:
        trainer.run()
    assert json.loads((tmp_path / "run.json").read_text())["data"] == {"rows": 3}


def test_a_plan_that_is_given_is_taken_as_it_is(make_trainer: Make, tmp_path: Path) -> None:
    plan = poros.Plan(num_slots=4, order="micro-batch-major", workspace=True)
    assert make_trainer(tmp_path, plan=plan).planned.plan == plan


def test_evaluation_between_steps_changes_no_bit(make_trainer: Make, make_steps: Any, tmp_path: Path) -> None:
    steps = make_steps(epochs=1)
    held_out = tuple(steps.row(index) for index in range(100, 107))
    with make_trainer(tmp_path / "plain", steps=steps) as trainer:
        trainer.run()
    with make_trainer(tmp_path / "evaluated", steps=steps, evaluation=held_out, eval_every=2) as trainer:
        trainer.evaluate()
        result = trainer.run()
    assert result.eval_loss == lines(tmp_path / "evaluated")[-1]["eval_loss"]
    assert [line["step"] for line in lines(tmp_path / "evaluated") if "eval_loss" in line] == [2, 4, 6]
    plain, evaluated = weights(tmp_path / "plain"), weights(tmp_path / "evaluated")
    assert all(torch.equal(plain[name], evaluated[name]) for name in plain)


def test_evaluation_is_weighted_by_tokens(make_trainer: Make, make_steps: Any, tmp_path: Path) -> None:
    rows = [make_steps().row(index) for index in (3, 4)]
    with make_trainer(tmp_path, evaluation=tuple(rows)) as trainer:
        sums = [trainer.load().evaluate([row]) for row in rows]
        event = trainer.evaluate()
    assert event is not None
    assert event.eval_supervised_tokens == sum(count for _, count in sums)
    assert event.eval_loss == sum(loss for loss, _ in sums) / event.eval_supervised_tokens


def test_held_out_rows_without_supervised_tokens_are_refused(
    make_trainer: Make, make_steps: Any, tmp_path: Path
) -> None:
    row = make_steps().row(3)
    row.labels.fill_(-100)
    trainer = make_trainer(tmp_path, evaluation=(row,))
    with trainer, pytest.raises(UserError, match="Nothing to evaluate"):
        trainer.evaluate()


def test_a_nan_in_a_gradient_stops_before_the_optimizer_and_names_step_rows_and_checkpoint(
    make_trainer: Make, tmp_path: Path
) -> None:
    with make_trainer(tmp_path, save_every=2) as trainer:
        engine = trainer.load()
        step = engine.step

        def poisoned(micro_batches: Any, index: int) -> Any:
            output = step(micro_batches, index)
            if index == 2:
                engine.model.bank.gradients["lora_B"][0] = float("nan")
            return output

        engine.step = poisoned  # type: ignore[method-assign]
        rows = [batch.row_ids[0] for batch in trainer.steps.step(2)]  # type: ignore[attr-defined]
        with pytest.raises(NonFiniteError, match=r"Optimizer step 3 .*gradient norm nan") as caught:
            trainer.run()
        after_two = {g: w.clone() for g, w in engine.model.bank.weights.items()}
    assert caught.value.exit_code == 1
    assert f"rows {rows}" in str(caught.value)
    assert str(tmp_path / "checkpoints" / "step-000002") in str(caught.value)
    assert all(torch.equal(weights(tmp_path)[f"weights.{g}"], w) for g, w in after_two.items())
    assert not (tmp_path / "adapter").exists()


def test_a_huge_learning_rate_is_no_success(make_trainer: Make, tmp_path: Path) -> None:
    optimizer = poros.OptimizerSettings(learning_rate=1e38, max_grad_norm=None)
    with make_trainer(tmp_path, optimizer=optimizer) as trainer, pytest.raises(NonFiniteError):
        trainer.run()


@pytest.mark.parametrize(
    "lora",
    [
        poros.LoraSettings(rank=4, blocks=(1,)),
        poros.LoraSettings(rank=4, blocks=(0,)),
        poros.LoraSettings(rank=4, targets=("q_proj",)),
    ],
)
def test_adapters_anywhere_receive_gradients(
    make_trainer: Make, make_steps: Any, tmp_path: Path, lora: poros.LoraSettings
) -> None:
    with make_trainer(tmp_path, steps=make_steps(epochs=1), lora=lora) as trainer:
        trainer.run()
        bank = trainer.engine.model.bank
        assert all(grad.any() for _, tensor, grad in bank.tensors(bank.gradients) if tensor.group == "lora_B")


def test_a_model_without_any_gradient_is_no_success(make_trainer: Make, tmp_path: Path) -> None:
    with make_trainer(tmp_path) as trainer:
        bank = trainer.load().model.bank
        with pytest.raises(PorosError, match="only zeros"):
            check_first_gradients(bank)


def test_a_failed_dry_save_stops_the_run_before_its_first_step(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OutputError("disk full")

    monkeypatch.setattr("poros.run.final_adapter.save_adapter", full)
    with make_trainer(tmp_path) as trainer, pytest.raises(OutputError, match="disk full"):
        trainer.run()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_used_output_folder_is_refused(make_trainer: Make, tmp_path: Path) -> None:
    (tmp_path / "something").write_text("mine")
    with pytest.raises(OutputError, match="not empty"):
        make_trainer(tmp_path)


def test_overwrite_replaces_a_run_only_when_the_new_one_is_ready(
    make_trainer: Make, make_steps: Any, tmp_path: Path
) -> None:
    with make_trainer(tmp_path, steps=make_steps(epochs=1), save_every=3) as trainer:
        trainer.run()
    (tmp_path / "mine.txt").write_text("kept")
    (tmp_path / "report.html").write_text("of the first run")
    with pytest.raises(BudgetError):
        make_trainer(tmp_path, overwrite=True, device_budget_bytes=1000)
    assert newest_complete(tmp_path)[0] is not None
    with make_trainer(tmp_path, steps=make_steps(num_rows=8, epochs=1), overwrite=True) as trainer:
        trainer.run()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]
    assert (tmp_path / "mine.txt").read_text() == "kept"
    assert not (tmp_path / "report.html").exists()


def test_only_the_newest_checkpoints_are_kept(make_trainer: Make, make_steps: Any, tmp_path: Path) -> None:
    with make_trainer(tmp_path, steps=make_steps(epochs=1), save_every=1, keep_checkpoints=2) as trainer:
        trainer.run()
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-000005", "step-000006"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_finishes_the_step_and_saves(
    make_trainer: Make, tmp_path: Path, number: signal.Signals
) -> None:
    handler = signal.getsignal(number)
    reporter = OnStep(lambda event: os.kill(os.getpid(), number) if event.step == 3 else None)
    with make_trainer(tmp_path, reporters=(reporter,)) as trainer:
        result = trainer.run()
    assert (result.interrupted, result.steps, result.adapter) == (True, 3, None)
    assert result.checkpoint == tmp_path / "checkpoints" / "step-000003"
    assert signal.getsignal(number) == handler


def test_the_second_signal_ends_at_once(make_trainer: Make, tmp_path: Path) -> None:
    def twice(event: StepEvent) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    with make_trainer(tmp_path, reporters=(OnStep(twice),)) as trainer, pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert newest_complete(tmp_path)[0] is None


def test_a_launcher_with_several_processes_is_refused(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="one process on one device"):
        make_trainer(tmp_path)


def test_a_missing_cuda_device_is_refused(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="expected a CUDA device, got none"):
        make_trainer(tmp_path, device="cuda")


def test_too_little_host_memory_is_refused_with_the_largest_term(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poros.run.memory.available_host_bytes", lambda: (1000, "limit of a test"))
    with pytest.raises(
        BudgetError,
        match=r"host memory .*expected at least `--ram 0\.\d+GB`, got 1 KB \(limit of a test; predicted: .*adapters",
    ):
        make_trainer(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"), [("int8", "not offered: .*outlier"), ("nf5", "Did you mean `nf4`")]
)
def test_an_unknown_format_is_refused(make_trainer: Make, tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        make_trainer(tmp_path, quantization=name)


def test_bf16_bitwise_warns_that_it_is_experimental(
    make_trainer: Make, make_steps: Any, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match="EXPERIMENTAL"):
        trainer = make_trainer(tmp_path, quantization="bf16_bitwise", steps=make_steps(epochs=1))
    with trainer:
        assert trainer.run().steps == 6


def test_a_float32_checkpoint_is_cast_with_a_note(
    make_trainer: Make, tiny_model: Path, tmp_path: Path
) -> None:
    from transformers import Qwen2ForCausalLM

    Qwen2ForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).save_pretrained(tmp_path / "model")
    with make_trainer(tmp_path / "run", model=tmp_path / "model") as trainer:
        assert "in torch.float32" in trainer.notes[0]


def test_a_step_without_supervised_tokens_is_refused(
    make_trainer: Make, make_steps: Any, tmp_path: Path
) -> None:
    steps = make_steps(epochs=1)
    step = steps.step

    def unsupervised(index: int) -> list[MicroBatch]:
        batches: list[MicroBatch] = step(index)
        for batch in batches:
            batch.labels.fill_(-100)
        return batches

    steps.step = unsupervised
    with make_trainer(tmp_path, steps=steps) as trainer, pytest.raises(UserError, match="nothing to learn"):
        trainer.run()
