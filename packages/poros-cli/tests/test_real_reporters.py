"""The real TensorBoard and W&B, offline: files that their own readers understand."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from poros_cli.main import run

pytestmark = [
    pytest.mark.reporters,
    # Of the packages, to their own developers.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def train(model: Path, rows: Path, output: Path, name: str, max_steps: int, *more: str) -> int:
    arguments = ["--model", str(model), "--data", str(rows), "--output", str(output), "--device", "cpu"]
    arguments += ["--micro-batches", "1", "--eval-fraction", "0.2", "--report-to", name]
    samples = ("--set", "sample_prompts=[Hello]", "--set", "sample_tokens=2")
    return run(["train", *arguments, "--max-steps", str(max_steps), *samples, *more])


def notes(output: Path) -> str:
    return " ".join(json.loads((output / "run.json").read_text())["notes"])


def test_tensorboard_reads_the_curves_of_a_resumed_run(saved_model: Path, rows: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output = tmp_path / "out"
    assert train(saved_model, rows, output, "tensorboard", 2) == 0
    assert train(saved_model, rows, output, "tensorboard", 3, "--resume") == 0
    assert "Reporter" not in notes(output)
    events = EventAccumulator(str(output / "tensorboard"))
    events.Reload()
    assert [scalar.step for scalar in events.Scalars("train/loss")] == [1, 2, 3]
    losses = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert events.Scalars("train/loss")[-1].value == pytest.approx(losses[-2]["loss"])
    assert [scalar.step for scalar in events.Scalars("eval/perplexity")] == [2, 3]
    assert "samples/0/text_summary" in events.Tags()["tensors"]


def test_wandb_writes_an_offline_run_without_a_login_and_resumes_it(
    saved_model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    output = tmp_path / "out"
    assert train(saved_model, rows, output, "wandb", 1) == 0
    first = (output / "wandb" / "poros-run-id").read_text()
    assert train(saved_model, rows, output, "wandb", 2, "--resume") == 0
    assert "Reporter" not in notes(output)
    assert (output / "wandb" / "poros-run-id").read_text() == first
    runs = sorted(path for path in (output / "wandb").glob("offline-run-*"))
    assert runs
    assert all(path.name.endswith(first) for path in runs)
    assert all(next(path.glob("*.wandb")).stat().st_size > 0 for path in runs)
