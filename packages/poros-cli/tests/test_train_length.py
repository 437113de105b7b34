"""How long a run is, and how much memory it may take, as the settings say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from poros.checkpoint import load_adapter
from poros_cli.main import run


def num_steps(model: Path, rows: Path, output: Path, *more: str) -> int:
    arguments = ["--model", str(model), "--data", str(rows), "--output", str(output), "--device", "cpu"]
    assert run(["train", *arguments, "--micro-batches", "6", "--rank", "2", *more]) == 0
    return len((output / "metrics.jsonl").read_text().splitlines())


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), 2),
        (("--epochs", "2"), 4),
        (("--max-steps", "1"), 1),
        (("--max-steps", "3"), 3),
        (("--epochs", "2", "--max-steps", "3"), 3),
        (("--epochs", "1", "--max-steps", "3"), 2),
    ],
)
def test_twelve_rows_in_steps_of_six(
    flags: tuple[str, ...], expected: int, saved_model: Path, rows: Path, tmp_path: Path
) -> None:
    assert num_steps(saved_model, rows, tmp_path / "out", *flags) == expected


def test_a_budget_that_is_too_small_names_the_largest_term(
    saved_model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(saved_model), "--data", str(rows), "--output", str(tmp_path / "out")]
    assert run(["train", *arguments, "--device", "cpu", "--vram", "20KB"]) == 2
    err = capsys.readouterr().err
    assert "Not enough device memory for the smallest plan: expected at least `--vram " in err
    assert "(the `vram` budget; predicted: " in err


def test_a_cached_store_gives_the_same_adapter(saved_model: Path, rows: Path, tmp_path: Path) -> None:
    cache = ("--cache-dir", str(tmp_path / "cache"), "--max-steps", "1")
    for name in ("first", "second"):
        num_steps(saved_model, rows, tmp_path / name, *cache)
    num_steps(saved_model, rows, tmp_path / "without", "--max-steps", "1")
    assert len(list((tmp_path / "cache").iterdir())) == 2  # one store, and the folder of tokenized rows
    adapters = [load_adapter(tmp_path / name / "adapter")[1] for name in ("first", "second", "without")]
    for other in adapters[1:]:
        assert all(torch.equal(other[name], tensor) for name, tensor in adapters[0].items())
