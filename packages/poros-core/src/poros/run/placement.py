"""The plan of a run on this machine: budgets, measured rates, the planner's choice."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from poros.blocks.kinds import BlockKind
from poros.blocks.layout import BlockLayout
from poros.errors import BudgetError, explain
from poros.planning.advice import with_one_more_gb
from poros.planning.measure import measure_rates, measuring_bytes
from poros.planning.measure_disk import measure_disk_rate
from poros.planning.planner import PlannedRun, make_plan
from poros.planning.rates import Rates
from poros.planning.request import Budget, PlanRequest
from poros.planning.shape import StepShape
from poros.run.memory import available_host_bytes, resolve_budget
from poros.run.opening import OpenModel
from poros.run.settings import RunSettings
from poros.settings import Plan
from poros.units import GB, format_bytes

__all__ = ["disk_note", "machine_rates", "plan_run"]

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
    left, limit = available_host_bytes()
    if left < (needed := measuring_bytes(device)):
        # Where the kernel kills at a limit, or a library ends the process there, no message would come any more.
        raise BudgetError(
            explain(
                "Too little host memory is left",
                expected=f"{format_bytes(needed)} for measuring this machine, and more for the run",
                got=format_bytes(left),
                where=limit,
                next_step="Free some memory or raise that limit",
            )
        )
    machine = machine_rates(device, model.numerics.compute_dtype, model.meta.kinds[0])
    cache_dir = None if settings.cache_dir is None else Path(settings.cache_dir).expanduser()
    request = PlanRequest.of(settings.plan) if isinstance(settings.plan, Plan) else settings.plan

    def make(shape: StepShape, budget: Budget, rates: Rates = machine) -> PlannedRun:
        return make_plan(
            model.meta,
            model.numerics,
            shape,
            budget,
            rates,
            request=request,
            device_type=device.type,
            optimizer=settings.optimizer.name,
            has_cache=cache_dir is not None,
        )

    planned = make(shape, budget)
    if planned.plan.disk_blocks and cache_dir is not None:
        rates = _with_disk_rate(machine, cache_dir)
        planned = make(shape, budget, rates)
        notes = (*notes, disk_note(planned, len(model.meta.blocks)))
        return planned, with_one_more_gb(planned, partial(make, rates=rates)), notes
    return planned, with_one_more_gb(planned, make), notes


def _with_disk_rate(rates: Rates, folder: Path) -> Rates:
    """Return rates with that of the folder's disk, measured if that can be done."""
    measured = measure_disk_rate(folder)
    if measured is None:
        return rates
    return replace(rates, disk_bytes_per_second=measured, disk_measured=True)


def disk_note(planned: PlannedRun, num_blocks: int) -> str:
    """Return what the user should know about a plan that reads blocks from the disk."""
    rates, time = planned.rates, planned.time
    return (
        f"{min(planned.plan.disk_blocks, num_blocks)} of {num_blocks} blocks are read from the store in `cache_dir`: "
        f"{time.disk_bytes / GB:.2f} GB a step at "
        f"{rates.disk_bytes_per_second / GB:.2f} GB/s ({'measured there' if rates.disk_measured else 'ASSUMED'}) in "
        f"{time.disk_seconds:.3g} s."
    )
