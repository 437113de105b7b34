"""A clock that is set back neither stops a run nor makes a duration negative."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import poros
from poros.clock import Stopwatch, per_second

Make = Callable[..., poros.Trainer]


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at any clock is earlier than the last."""
    now = [1e6]

    def earlier() -> float:
        now[0] -= 3.5
        return now[0]

    for name in ("perf_counter", "monotonic", "time"):
        monkeypatch.setattr(time, name, earlier)


def test_a_duration_is_never_negative(backwards: None) -> None:
    assert Stopwatch().seconds == 0.0


def test_a_rate_without_time_is_zero() -> None:
    assert per_second(100, 0.0) == 0.0


def test_a_run_whose_clock_goes_backwards_finishes(
    make_trainer: Make, make_steps: Any, tmp_path: Path, backwards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poros.run.placement._MEASURED", {})  # rates too are measured with this clock
    steps = make_steps(num_rows=4, accumulation=2, epochs=1)
    rows = (steps.row(100),)
    with make_trainer(tmp_path, steps=steps, evaluation=rows, eval_every=1, warm_up=True) as trainer:
        result = trainer.run()
    assert result.steps == 2
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    names = ("seconds", "tokens_per_second", "exposed_copy_seconds", "eval_seconds")
    assert all(line.get(name, 0.0) == 0.0 for line in lines for name in names)


def test_a_frozen_clock_divides_by_nothing(
    make_trainer: Make, make_steps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 7.0)
    monkeypatch.setattr("poros.run.placement._MEASURED", {})
    with make_trainer(tmp_path, steps=make_steps(num_rows=2, accumulation=2, epochs=1)) as trainer:
        assert trainer.run().seconds == 0.0
