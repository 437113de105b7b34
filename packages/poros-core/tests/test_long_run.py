"""The short form of `nox -s long-run`: a hundred steps with everything that a long run does."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3] / "validation"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("long_run", ROOT / "long_run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return script().long_run(tmp_path_factory.mktemp("long"), 100)


def test_a_hundred_steps_with_a_failing_reporter_are_complete_and_flat(found: dict[str, Any]) -> None:
    assert script().broken(found, 100) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"host_bytes_grown": 2**30}, "host memory is flat"),
        ({"descriptors": [7, 8]}, "descriptors are flat"),
        ({"threads": [7, 8]}, "threads are flat"),
        ({"step_lines": False}, "every step has its line"),
        ({"faults": 100}, "the reporter was switched off"),
    ],
)
def test_what_is_not_flat_or_complete_is_named(
    found: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    assert script().broken({**found, **change}, 100) == [named]


def test_the_receipt_on_record_holds() -> None:
    receipt = json.loads((ROOT / "receipts" / "long-run.json").read_text())
    assert receipt["measured"]["num_steps"] == 2000
    assert receipt["broken"] == script().broken(receipt["measured"], 2000) == []
