"""What architecture packages ship about themselves is what the receipts of the repository say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from poros.evidence import receipts_of
from poros.plugins import load_registry

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ship_receipts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ship_receipts", ROOT / "tools" / "ship_receipts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("package", ["poros_arch_gemma", "poros_arch_qwen"])
def test_the_shipped_file_is_made_from_the_receipts(ship_receipts: ModuleType, package: str) -> None:
    assert package in ship_receipts.packages()
    expected = ship_receipts.content(package)
    assert ship_receipts.target(package).read_text() == expected, "run `uv run python tools/ship_receipts.py`"


def test_every_passed_residency_receipt_is_shipped(ship_receipts: ModuleType) -> None:
    passed = {
        p.stem for p in ship_receipts.RECEIPTS.glob("residency-*.json") if json.loads(p.read_text())["passed"]
    }
    shipped = [json.loads(ship_receipts.target(package).read_text()) for package in ship_receipts.packages()]
    assert passed <= {r["name"] for found in shipped for receipts in found.values() for r in receipts}


def test_an_installed_package_answers_for_its_architecture() -> None:
    receipts = receipts_of(load_registry().architectures["qwen2"].value())
    found = {(receipt.claim, receipt.subject, receipt.device_name) for receipt in receipts}
    assert ("residency", "qwen2.5-7b", "NVIDIA H200") in found
    assert ("residency", "qwen2.5-72b, 8 blocks", "NVIDIA H200") in found
