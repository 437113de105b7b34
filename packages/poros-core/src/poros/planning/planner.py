"""From budgets to a plan: the fastest placement that fits, what bounds it, and what to say where none fits."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace

from poros.errors import BudgetError, ConfigError, explain
from poros.model import NO_CACHE, MetaModel
from poros.planning.facts import model_facts
from poros.planning.prediction import Prediction
from poros.planning.rates import Rates
from poros.planning.request import Budget, PlanRequest
from poros.planning.search import Candidate, Search
from poros.planning.shape import StepShape
from poros.planning.step_time import StepTime
from poros.settings import Numerics, Plan
from poros.units import GB, format_gb, list_terms

__all__ = ["PlannedRun", "make_plan"]

# Of the fastest step time, what a frugal plan may give away to need less memory.
FRUGAL_TOLERANCE = 0.01
# A resource binds where having more of it would save more of the step than this.
BINDING_TOLERANCE = 0.01
# Refusals name the smallest budget in whole hundredths of a GB.
BUDGET_STEP_BYTES = GB // 100


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """A plan, why it is this one, and what it is predicted to need and to take.

    Attributes:
        plan: the placement.
        shape: the step that everything is predicted for.
        prediction: memory terms.
        time: of a step.
        binding: ``compute``, ``link`` (copies that more device memory could spare), ``disk`` (reads that more host
            memory could spare), ``device memory`` or ``host memory`` (a budget forbids a plan that streams faster).
        budget: what the plan was made under.
        rates: what step times were predicted from.
    """

    plan: Plan
    shape: StepShape
    prediction: Prediction
    time: StepTime
    binding: str
    budget: Budget
    rates: Rates


def make_plan(
    meta: MetaModel,
    numerics: Numerics,
    shape: StepShape,
    budget: Budget,
    rates: Rates,
    *,
    request: PlanRequest | None = None,
    device_type: str = "cuda",
    optimizer: str = "adamw",
    has_cache: bool = False,
) -> PlannedRun:
    """Choose the placement of a run. Numerics are never touched: whatever is chosen, the bits are the same.

    Blocks are read from the disk only where no plan without it fits the host budget, and then as few as possible.

    Args:
        meta: the model without weights.
        numerics: settings that decide bits.
        shape: the largest optimizer step.
        budget: memory that may be used.
        rates: of the machine.
        request: fields that are already decided.
        device_type: ``cuda`` or ``cpu``.
        optimizer: `OptimizerSettings.name`, which decides the bytes of moments.
        has_cache: there is a folder for quantized stores, from which blocks can be streamed.

    Raises:
        BudgetError: no plan fits; the terms and the smallest budget that works are named.
        ConfigError: pinned fields contradict the numerics, or need a folder that is not there.
    """
    request = request or PlanRequest()
    if request.disk_blocks and not has_cache:
        raise ConfigError(NO_CACHE)
    facts = model_facts(meta, numerics, optimizer)

    def search_for(tokens: int, *, from_disk: bool = has_cache) -> Search:
        cut = replace(shape, tokens=tokens)
        return Search(facts, numerics, cut, rates, request, device_type, from_disk=from_disk)

    search = search_for(shape.tokens, from_disk=False)
    fastest = search.fastest(budget.device_bytes, budget.host_bytes, keep=not budget.frugal)
    if fastest is None and has_cache:
        search = search_for(shape.tokens)
        fastest = search.fastest(budget.device_bytes, budget.host_bytes, keep=not budget.frugal)
    if fastest is None:
        lengths = range(numerics.length_bucket, shape.tokens, numerics.length_bucket)
        longest = bisect_left(lengths, True, key=lambda tokens: not _fits(search_for(tokens), budget))
        raise _refusal(search, budget, lengths[longest - 1] if longest else None, has_cache=has_cache)
    chosen = fastest
    if budget.frugal:
        allowed = fastest.time.seconds * (1 + FRUGAL_TOLERANCE)
        smaller = search.smallest(budget.host_bytes, within_seconds=allowed)
        # Bisecting finds the smallest of each choice to the resolution of predictions only: the fastest may be smaller.
        if smaller is not None and smaller.memory.device_bytes < fastest.memory.device_bytes:
            chosen = smaller
    return PlannedRun(
        plan=chosen.plan,
        shape=shape,
        prediction=chosen.memory,
        time=chosen.time,
        binding=_binding(search, chosen, budget),
        budget=budget,
        rates=rates,
    )


def _fits(search: Search, budget: Budget) -> bool:
    smallest = search.smallest(budget.host_bytes)
    limit = budget.device_bytes
    return smallest is not None and (limit is None or smallest.memory.device_bytes <= limit)


def _binding(search: Search, chosen: Candidate, budget: Budget) -> str:
    """Name what the step waits for."""

    def much_faster(other: Candidate | None) -> bool:
        return other is not None and other.time.seconds * (1 + BINDING_TOLERANCE) < chosen.time.seconds

    without = search.price(replace(chosen.plan, disk_blocks=0)).time.seconds
    if without * (1 + BINDING_TOLERANCE) < chosen.time.seconds:
        return "disk"
    if much_faster(search.fastest(budget.device_bytes, None, keep=not budget.frugal)):
        return "host memory"
    # Blocks that stay on the device only spare the link; does the budget forbid anything else that would be faster?
    alike = search.pinning(
        residency=chosen.plan.residency,
        num_slots=chosen.plan.num_slots,
        resident_blocks=chosen.plan.resident_blocks,
        kept_blocks=chosen.plan.kept_blocks,
        disk_blocks=chosen.plan.disk_blocks,
    )
    if much_faster(alike.fastest(None, None)):
        return "device memory"
    return "link" if chosen.time.exposed_seconds > BINDING_TOLERANCE * chosen.time.seconds else "compute"


def _refusal(search: Search, budget: Budget, fitting_tokens: int | None, *, has_cache: bool) -> BudgetError:
    shorter = f". Rows of up to {fitting_tokens} tokens would fit" if fitting_tokens else ""
    least_host = search.least_host_terms(budget.device_bytes)
    if least_host is not None:  # the device would do
        return _explain(
            "host memory",
            "--ram",
            least_host,
            got=budget.host_bytes or 0,
            limit=budget.host_limit,
            next_step=(
                "Give more `ram`: this is what stays in host memory beside blocks on the disk"
                if has_cache
                else "Set `cache_dir` to a folder on a fast disk: blocks that do not fit are streamed from there. Or "
                "give more `ram`, or more `vram` so that blocks stay on the device"
            )
            + shorter,
        )
    smallest = search.smallest(budget.host_bytes) or search.smallest(None)
    assert smallest is not None
    return _explain(
        "device memory",
        "--vram",
        smallest.memory.device,
        got=budget.device_bytes or 0,
        limit=budget.device_limit,
        next_step="Give that much, or lower `micro_batch_size` or `max_length`; settings under `plan` limit the choice"
        + shorter,
    )


def _explain(
    what: str, option: str, terms: Mapping[str, int], *, got: int, limit: str, next_step: str
) -> BudgetError:
    needed = math.ceil(sum(terms.values()) / BUDGET_STEP_BYTES) * BUDGET_STEP_BYTES
    return BudgetError(
        explain(
            f"Not enough {what} for the smallest plan",
            expected=f"at least `{option} {needed / GB:.2f}GB`",
            got=format_gb(got),
            where=f"{limit}; predicted: {list_terms(terms)}",
            next_step=next_step,
        )
    )
