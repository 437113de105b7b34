"""Poros: fine-tune LoRA adapters on models larger than GPU memory, bitwise equal to a resident run.

The names below are the Python interface; they are imported on first use, so that ``import poros`` stays cheap for
plugins that only need a marker.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from poros.hookspecs import hookimpl

if TYPE_CHECKING:
    from poros.engine.engine import Engine, StepOutput
    from poros.optimizer import BankOptimizer
    from poros.planning.request import PlanRequest
    from poros.planning.shape import StepShape
    from poros.run import (
        OpenModel,
        Reporter,
        RunResult,
        RunSettings,
        Trainer,
        open_model,
        plan_run,
        save_final_adapter,
        train,
    )
    from poros.settings import LoraSettings, Numerics, OptimizerSettings, Plan
    from poros.torch_module import streamed_model

__all__ = [
    "BankOptimizer",
    "Engine",
    "LoraSettings",
    "Numerics",
    "OpenModel",
    "OptimizerSettings",
    "Plan",
    "PlanRequest",
    "Reporter",
    "RunResult",
    "RunSettings",
    "StepOutput",
    "StepShape",
    "Trainer",
    "__version__",
    "hookimpl",
    "open_model",
    "plan_run",
    "save_final_adapter",
    "streamed_model",
    "train",
]

__version__ = "0.1.0"

_HOMES = {
    "poros.engine.engine": ("Engine", "StepOutput"),
    "poros.optimizer": ("BankOptimizer",),
    "poros.planning.request": ("PlanRequest",),
    "poros.planning.shape": ("StepShape",),
    "poros.run": (
        "OpenModel",
        "Reporter",
        "RunResult",
        "RunSettings",
        "Trainer",
        "open_model",
        "plan_run",
        "save_final_adapter",
        "train",
    ),
    "poros.settings": ("LoraSettings", "Numerics", "OptimizerSettings", "Plan"),
    "poros.torch_module": ("streamed_model",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module `poros` has no attribute `{name}`")
