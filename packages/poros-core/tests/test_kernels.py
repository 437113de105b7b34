"""Which implementation of a replaceable function runs, and that a change of it cannot be compared."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from poros.kernels import TORCH, active_kernel, torch_kernels
from poros.parity.compare import compare
from poros.parity.trajectory import Trajectory


def own_rule(x: int) -> int:
    return x


# As Transformers' modelling modules are.
own_rule.__module__ = "transformers.models.some.modeling_some"


def replaceable(package: str) -> Callable[..., Any]:
    function: Callable[..., Any] = use_kernel_func_from_hub_with_fallback("rule", package)(own_rule)
    return function


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> str:
    """An importable package with a faster rule."""
    module = ModuleType("fast_rules")

    def rule(x: int) -> int:
        return -x

    rule.__module__ = "fast_rules.ops"
    module.rule = rule  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fast_rules", module)
    return "fast_rules"


def test_without_the_package_transformers_own_code_runs() -> None:
    assert active_kernel(replaceable("no_such_package")) == TORCH


def test_an_installed_package_is_named(package: str) -> None:
    assert active_kernel(replaceable(package)) == package


def test_a_function_of_another_make_is_unknown() -> None:
    assert active_kernel(own_rule) == "unknown"


def test_transformers_own_code_runs_for_a_while(package: str) -> None:
    module = ModuleType("modelling")
    module.rule = replaceable(package)  # type: ignore[attr-defined]
    with torch_kernels(module, ["rule"]):
        assert module.rule(1) == 1
    assert module.rule(1) == -1


def test_runs_with_different_kernels_cannot_be_compared(tmp_path: Path) -> None:
    tensors = {"0/losses": torch.ones(2)}
    Trajectory((), tensors, {"rule": "torch"}).save(tmp_path / "saved.safetensors")
    saved = Trajectory.load(tmp_path / "saved.safetensors", ())
    assert compare(saved, Trajectory((), tensors, {"rule": "torch"})).outcome == "equal"
    verdict = compare(saved, Trajectory((), tensors, {"rule": "fast 1.0"}))
    assert verdict.outcome == "cannot compare"
    assert "rule: torch against fast 1.0" in verdict.detail
