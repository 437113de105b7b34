"""Real signals to a real `poros train`: what a terminal, a scheduler or an impatient user sends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from poros.checkpoint import load_adapter
from poros.checkpoint.manifest import check_manifest
from poros_cli.main import run

# A slow machine that is busy with other things.
START_SECONDS, END_SECONDS = 180, 120
COMMAND = "import sys; from poros_cli.main import main; sys.argv[0] = 'poros'; main()"
CONSTANT = ("--set", "optimizer.schedule=constant")


def arguments(model: Path, rows: Path, output: Path, max_steps: int, *more: str) -> list[str]:
    """Return a run whose steps do not depend on how many there will be."""
    return [
        *("train", "--model", str(model), "--data", str(rows), "--output", str(output), "--device", "cpu"),
        *("--micro-batches", "1", "--dropout", "0.1", "--max-steps", str(max_steps), *CONSTANT, *more),
    ]


@contextlib.contextmanager
def training(output: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start `poros` and wait for its third step."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = time.monotonic() + START_SECONDS
        while steps(output) < 3:
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"no third step: {process.communicate(timeout=5)[0]}")
            time.sleep(0.05)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def steps(output: Path) -> int:
    path = output / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def checkpoints(output: Path) -> list[Path]:
    return sorted((output / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_exits_130_and_the_resumed_run_has_the_same_bits(
    saved_model: Path, rows: Path, tmp_path: Path, number: signal.Signals
) -> None:
    output = tmp_path / "parts"
    with training(output, *arguments(saved_model, rows, output, 10**6)) as process:
        process.send_signal(number)
        shown, _ = process.communicate(timeout=END_SECONDS)
    assert process.returncode == 130, shown
    result = json.loads((output / "run.json").read_text())["result"]
    done = result["steps"]
    assert f"Interrupted after step {done}; saved" in shown
    assert [path.name for path in checkpoints(output)] == [f"step-{done:06d}"]
    check_manifest(checkpoints(output)[0])
    assert steps(output) == done
    assert run(arguments(saved_model, rows, output, done + 1, "--resume")) == 0
    assert run(arguments(saved_model, rows, tmp_path / "whole", done + 1)) == 0
    whole, parts = (load_adapter(folder / "adapter")[1] for folder in (tmp_path / "whole", output))
    assert set(whole) == set(parts)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_second_signal_exits_at_once_and_every_finished_checkpoint_is_whole(
    saved_model: Path, rows: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    # A checkpoint after every step: the signals arrive in or near a save.
    more = ("--save-every", "1", "--set", "keep_checkpoints=100")
    with training(output, *arguments(saved_model, rows, output, 10**6, *more)) as process:
        for number in (signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
            time.sleep(0.002)  # two of a kind that are not yet delivered count as one
        shown, _ = process.communicate(timeout=END_SECONDS)
    assert process.returncode == 130, shown
    assert checkpoints(output)
    for folder in checkpoints(output):
        check_manifest(folder)
    assert run(arguments(saved_model, rows, output, steps(output) + 2, "--resume")) == 0
