"""The plan of a run on this machine: budgets, measured rates, the planner's choice."""

from __future__ import annotations

import torch

from poros.blocks.kinds import BlockKind
from poros.blocks.layout import BlockLayout
from poros.planning.advice import with_one_more_gb
from poros.planning.measure import measure_rates
from poros.planning.planner import PlannedRun, make_plan
from poros.planning.rates import Rates
from poros.planning.request import Budget, PlanRequest
from poros.planning.shape import StepShape
from poros.run.memory import resolve_budget
from poros.run.opening import OpenModel
from poros.run.settings import RunSettings
from poros.settings import Plan

__all__ = ["machine_rates", "plan_run"]

_MEASURED: dict[tuple[torch.device, torch.dtype, BlockLayout], Rates] = {}


def machine_rates(device: torch.device, compute_dtype: torch.dtype, kind: BlockKind) -> Rates:
    """Return the rates of a device, measured once per process, dtype and layout of blocks."""
    key = (device, compute_dtype, kind.layout)
    if key not in _MEASURED:
        _MEASURED[key] = measure_rates(device, compute_dtype, kind)
    return _MEASURED[key]


def plan_run(
    model: OpenModel, settings: RunSettings, device: torch.device, shape: StepShape
) -> tuple[PlannedRun, PlannedRun, tuple[str, ...]]:
    """Plan a run on this machine; return the plan, the one with one more GB, and sentences that the user should see.

    Raises:
        BudgetError: no plan fits into what is allowed or free.
    """
    budget, notes = resolve_budget(
        device, device_bytes=settings.device_budget_bytes, host_bytes=settings.host_budget_bytes
    )
    rates = machine_rates(device, model.numerics.compute_dtype, model.meta.kinds[0])
    request = PlanRequest.of(settings.plan) if isinstance(settings.plan, Plan) else settings.plan

    def make(shape: StepShape, budget: Budget) -> PlannedRun:
        return make_plan(
            model.meta, model.numerics, shape, budget, rates, request=request, device_type=device.type
        )

    planned = make(shape, budget)
    return planned, with_one_more_gb(planned, make), notes
