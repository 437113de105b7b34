"""Poros' comparison of streamed and resident runs works on an asserted architecture: measured here, claimed nowhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from poros import LoraSettings, Numerics, OptimizerSettings, open_model
from poros.run.residency_check import compare_residencies


def test_streamed_and_resident_are_compared_and_nothing_is_claimed(
    model: Path, steps: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    numerics = Numerics(compute_dtype=torch.float32, length_bucket=4)
    with pytest.warns(UserWarning, match="no claim of bitwise equality is made for this run") as warned:
        opened = open_model(model, lora=LoraSettings(rank=4), numerics=numerics)
    verdict = compare_residencies(
        opened,
        steps,
        num_steps=3,
        device=torch.device("cpu"),
        seed=0,
        optimizer=OptimizerSettings(learning_rate=1e-2),
    )
    assert verdict.outcome == "equal", verdict.detail
    assert opened.verdict.status == "user_asserted"
    assert len(warned) == 1
    shown = capsys.readouterr()
    assert "bitwise" not in f"{verdict} {shown.out} {shown.err}"
