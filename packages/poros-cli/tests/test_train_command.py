"""`poros train` from end to end on a tiny checkpoint."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from poros.checkpoint import load_adapter
from poros.run import Reporter, StepEvent
from poros_cli.main import run
from poros_cli.output import ProgressReporter

Train = Callable[..., int]


@pytest.fixture
def train(device: str) -> Train:
    """Run `poros train` on the tier's device."""

    def trained(model: Path, rows: Path, output: Path, *more: str) -> int:
        arguments = ["--model", str(model), "--data", str(rows), "--output", str(output), "--device", device]
        return run(["train", *arguments, "--micro-batches", "2", *more])

    return trained


def adapter(output: Path) -> dict[str, torch.Tensor]:
    return load_adapter(output / "adapter")[1]


def test_flags_alone_train_and_summarize(
    train: Train, model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model, rows, tmp_path / "out", "--max-steps", "3", "--eval-data", str(rows)) == 0
    shown = capsys.readouterr().out
    assert "qwen2 (validated, from poros-arch-qwen), 2 blocks, nf4" in shown
    assert "Plan: 2 slots, 0 of 2 blocks resident" in shown
    assert "Predicted for the largest step: " in shown
    assert "step 3/3  loss" in shown
    assert "Largest steps predicted " in shown
    assert "held-out loss" in shown
    assert "supervised of" in shown
    assert f"Adapter: {tmp_path / 'out' / 'adapter'} (28 tensors of 14 modules" in shown
    metrics = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [1, 2, 3, 3]


def test_a_config_file_with_overrides_gives_the_same_bits_as_flags(
    train: Train, device: str, model: Path, rows: Path, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {model}\ndata: {rows}\noutput: {tmp_path / 'a'}\nmicro_batches: 2\nmax_steps: 9\n"
    )
    assert run(["train", str(config), "--set", "max_steps=2", "--device", device]) == 0
    assert train(model, rows, tmp_path / "b", "--max-steps", "2") == 0
    a, b = adapter(tmp_path / "a"), adapter(tmp_path / "b")
    assert set(a) == set(b)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_residency_changes_no_bit(train: Train, model: Path, rows: Path, tmp_path: Path) -> None:
    for residency in ("streamed", "resident"):
        assert train(model, rows, tmp_path / residency, "--max-steps", "2", "--residency", residency) == 0
    streamed, resident = adapter(tmp_path / "streamed"), adapter(tmp_path / "resident")
    assert all(torch.equal(streamed[name], resident[name]) for name in streamed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_exits_with_130_and_resumes_to_the_same_bits(
    train: Train,
    model: Path,
    rows: Path,
    tmp_path: Path,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train(model, rows, tmp_path / "whole") == 0
    on_step = ProgressReporter.on_step

    def interrupted(self: Reporter, event: StepEvent) -> None:
        on_step(self, event)  # type: ignore[arg-type]
        if event.step == 2:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(ProgressReporter, "on_step", interrupted)
    assert train(model, rows, tmp_path / "parts") == 130
    assert "Interrupted after step 2" in capsys.readouterr().out
    monkeypatch.undo()
    assert train(model, rows, tmp_path / "parts", "--resume") == 0
    whole, parts = adapter(tmp_path / "whole"), adapter(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_resuming_with_another_rank_or_other_data_is_refused_with_old_and_new(
    train: Train, model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model, rows, tmp_path / "out", "--max-steps", "1", "--rank", "8") == 0
    before = sorted((tmp_path / "out").rglob("*"))
    assert train(model, rows, tmp_path / "out", "--resume", "--rank", "16") == 2
    assert "lora.rank: 8 -> 16" in capsys.readouterr().err
    rows.write_text(rows.read_text().replace("Number 3", "Number three"))
    assert train(model, rows, tmp_path / "out", "--resume", "--rank", "8") == 2
    assert "data.data: " in capsys.readouterr().err
    assert sorted((tmp_path / "out").rglob("*")) == before


def test_a_nan_run_fails_with_exit_code_1_and_no_adapter(
    train: Train, model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    huge = ("--learning-rate", "1e38", "--set", "optimizer.max_grad_norm=null")
    assert train(model, rows, tmp_path / "out", *huge) == 1
    assert "is not finite" in capsys.readouterr().err
    assert not (tmp_path / "out" / "adapter").exists()


def test_warnings_are_one_line_each(
    train: Train, model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model, rows, tmp_path / "out", "--max-steps", "1", "--quantization", "bf16_bitwise") == 0
    shown = capsys.readouterr()
    assert "Warning: EXPERIMENTAL" in shown.out
    assert "FutureWarning" not in shown.out + shown.err


def test_progress_lines_say_what_moved_and_stalled(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    fields: dict[str, Any] = {"learning_rate": 1.0, "grad_norm": 1.0, "supervised_tokens": 5, "seconds": 0.5}
    with ProgressReporter(Console(force_terminal=False, soft_wrap=True)) as progress:
        progress.on_step(
            StepEvent(
                step=1,
                loss=2.0,
                tokens=100,
                tokens_per_second=200.0,
                h2d_bytes=3 * 2**30,
                exposed_copy_seconds=1.25,
                peak_device_bytes=None,
                grown_host_bytes=0,
                **fields,
            )
        )
    assert capsys.readouterr().out == ("step 1/1  loss 2.0000  200 tokens/s  moved 3.00 GiB  stalled 1.2 s\n")
