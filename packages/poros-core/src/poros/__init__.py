"""Poros: fine-tune LoRA adapters on models larger than GPU memory, bitwise equal to a resident run.

The names below are the Python interface; they are imported on first use, so that ``import poros`` stays cheap for
plugins that only need a marker.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from poros.hookspecs import hookimpl

if TYPE_CHECKING:
    from poros.planning.request import PlanRequest
    from poros.run import OpenModel, Reporter, RunResult, RunSettings, Trainer, open_model
    from poros.settings import LoraSettings, Numerics, OptimizerSettings, Plan

__all__ = [
    "LoraSettings",
    "Numerics",
    "OpenModel",
    "OptimizerSettings",
    "Plan",
    "PlanRequest",
    "Reporter",
    "RunResult",
    "RunSettings",
    "Trainer",
    "__version__",
    "hookimpl",
    "open_model",
]

__version__ = "0.1.0"

_HOMES = {
    "poros.planning.request": ("PlanRequest",),
    "poros.run": ("OpenModel", "Reporter", "RunResult", "RunSettings", "Trainer", "open_model"),
    "poros.settings": ("LoraSettings", "Numerics", "OptimizerSettings", "Plan"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module `poros` has no attribute `{name}`")
