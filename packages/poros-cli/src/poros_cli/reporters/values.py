"""What both reporters log, and how a missing package is said."""

from __future__ import annotations

import dataclasses

from poros.errors import ConfigError, explain
from poros.run import EvalEvent, StepEvent

__all__ = ["eval_values", "missing_package", "step_values"]


def step_values(event: StepEvent) -> dict[str, float]:
    """Return the numbers of a step as ``train/<name>``; what was not measured is left out."""
    return _values(event, "train")


def eval_values(event: EvalEvent) -> dict[str, float]:
    """Return the numbers of an evaluation as ``eval/<name>``."""
    return _values(event, "eval")


def _values(event: StepEvent | EvalEvent, group: str) -> dict[str, float]:
    values = dataclasses.asdict(event)
    del values["step"]
    return {f"{group}/{k.removeprefix('eval_')}": v for k, v in values.items() if v is not None}


def missing_package(name: str, error: ImportError) -> ConfigError:
    """Return the error for a reporter whose package cannot be imported."""
    return ConfigError(
        explain(
            f"Cannot report to `{name}`",
            expected=f"the package `{name}`",
            got=f"{type(error).__name__}: {error}",
            where="report_to",
            next_step=f"Run `uv add 'poros-cli[{name}]'`, or leave `{name}` out of `report_to`",
        )
    )
