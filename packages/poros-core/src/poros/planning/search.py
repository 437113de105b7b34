"""The space of plans, the fastest one that fits and the smallest one that is fast enough.

The space is small and walked whole: a larger budget only adds plans, so more memory is never predicted to be slower.
The long axes, how many blocks stay resident and how many of them are not recomputed, are bisected: each further one
takes memory and saves copies, or a forward.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from poros.errors import ConfigError, explain
from poros.planning.facts import ModelFacts
from poros.planning.prediction import Prediction, predict_from_facts
from poros.planning.rates import Rates
from poros.planning.request import PlanRequest
from poros.planning.shape import StepShape
from poros.planning.step_time import StepTime, predict_step_time
from poros.settings import ACCUMULATION_ORDERS, PLACES, Numerics, Plan

__all__ = ["Candidate", "Search"]

MAX_SLOTS = 6
# Blocks that keep their forward are counted in this many steps.
KEPT_STRIDES = 14
# Predictions are not finer than this share: two plans this close are equally fast, and the smaller one is taken.
RESOLUTION = 1e-3


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with what it is predicted to need and to take."""

    plan: Plan
    memory: Prediction
    time: StepTime

    @property
    def ticks(self) -> int:
        """The step time on a scale whose marks are one resolution apart."""
        return _ticks(self.time.seconds)


class Search:
    """Plans of one model, step shape and machine, under what the user pinned.

    Args:
        facts: of the model.
        numerics: never changed.
        shape: the largest step.
        rates: of the machine.
        request: pinned fields.
        device_type: ``cuda`` or ``cpu``; on the CPU device memory is host memory.
        from_disk: what a host budget does not hold of the blocks comes from the disk, as few as possible.
    """

    def __init__(
        self,
        facts: ModelFacts,
        numerics: Numerics,
        shape: StepShape,
        rates: Rates,
        request: PlanRequest,
        device_type: str,
        *,
        from_disk: bool = False,
    ) -> None:
        self._facts, self._numerics, self._shape = facts, numerics, shape
        self._rates, self._device_type = rates, device_type
        self._pinned = request.pinned()
        self._from_disk = from_disk and "disk_blocks" not in self._pinned
        self._bases = list(self._make_bases())

    def _make_bases(self) -> Iterator[Plan]:
        """Yield every combination of choices with the fewest resident blocks."""
        pinned = self._pinned
        needs = self._facts.needs_dequantize
        workspaces = (
            [True] if needs and self._numerics.blocks == "compiled" else [False, True] if needs else [False]
        )
        if pinned.get("workspace") is False and workspaces == [True]:
            raise ConfigError(
                explain(
                    "Bad setting `plan.workspace`",
                    expected="true or null with `numerics.blocks: compiled`",
                    got="false",
                    next_step="Compiled blocks read their matrices from the workspace",
                )
            )
        orders = ACCUMULATION_ORDERS if self._shape.num_micro_batches > 1 else ACCUMULATION_ORDERS[:1]
        choices: dict[str, list[Any]] = {
            "num_slots": list(range(2, min(MAX_SLOTS, max(2, self._facts.num_blocks)) + 1)),
            "head": list(PLACES),
            "activations": list(PLACES),
            "order": list(orders),
            "workspace": workspaces,
        }
        if pinned.get("residency") == "resident":  # nothing is streamed: these have no meaning
            choices |= {"num_slots": [2], "head": ["device"], "activations": ["device"]}
        if pinned.get("kept_blocks"):  # each of them is resident
            choices["resident_blocks"] = [pinned["kept_blocks"]]
        choices |= {name: [value] for name, value in pinned.items()}
        for values in itertools.product(*choices.values()):
            yield Plan(**dict(zip(choices, values, strict=True)))

    def price(self, plan: Plan) -> Candidate:
        """Predict one plan."""
        return Candidate(plan, self._memory(plan), self._time(plan))

    def fastest(
        self, device_bytes: int | None, host_bytes: int | None, *, keep: bool = False
    ) -> Candidate | None:
        """Return the fastest plan within both budgets, of equally fast ones the smallest; None where none fits.

        Args:
            device_bytes, host_bytes: the budgets.
            keep: spend what memory is left on forwards that need no recompute.
        """
        best: Candidate | None = None
        for base in self._bases:
            best = self._better(best, base, device_bytes, host_bytes)
        if best is None or not keep or "kept_blocks" in self._pinned or self._shape.packed:
            return best
        alike = {2, best.plan.num_slots}
        for base in self._bases:
            if base.workspace == best.plan.workspace and base.num_slots in alike:
                best = self._keeping_more(best, base, device_bytes, host_bytes)
        return best

    def _keeping_more(
        self, best: Candidate, base: Plan, device_bytes: int | None, host_bytes: int | None
    ) -> Candidate:
        """Return the faster of the best plan so far and what ``base`` becomes with forwards that are kept.

        A fixed scale of counts with all blocks at its end, so that a larger budget has every choice of a smaller one.
        """
        for count in self._kept_counts(base, device_bytes):
            kept = _keeping(base, count)
            if self._time(kept).compute_seconds > best.time.seconds:
                break  # fewer take longer still
            best = self._better(best, kept, device_bytes, host_bytes) or best
        return best

    def _better(
        self, best: Candidate | None, base: Plan, device_bytes: int | None, host_bytes: int | None
    ) -> Candidate | None:
        """Return the faster of the best plan so far and what can be made of ``base`` with more resident blocks."""
        counts = self._fitting_counts(base, device_bytes, host_bytes)
        if not counts:
            return best
        found = self.price(self._with(base, counts[-1], host_bytes))  # more resident blocks never copy more
        if best is not None and found.ticks > best.ticks:
            return best
        found = self._least_resident(base, counts, found.ticks, host_bytes)
        return found if best is None else min(best, found, key=_order)

    def _kept_counts(self, base: Plan, device_bytes: int | None) -> list[int]:
        """Return the numbers of blocks that fit with their forwards, each of them resident, the largest first."""

        def too_large(count: int) -> bool:
            return (
                device_bytes is not None and self._memory(_keeping(base, count)).device_bytes > device_bytes
            )

        pinned = base.residency != "resident" and "resident_blocks" in self._pinned
        last = base.resident_blocks if pinned else self._facts.num_blocks
        stride = max(1, self._facts.num_blocks // KEPT_STRIDES)
        scale = range(stride, last, stride)
        fitting = list(scale[: bisect_left(scale, True, key=too_large)])
        # Without a streamed block there are no slots either: the last step may take less than the one before.
        if last and not too_large(last):
            fitting.append(last)
        return fitting[::-1]

    def smallest(self, host_bytes: int | None, *, within_seconds: float | None = None) -> Candidate | None:
        """Return the plan with the least device memory, optionally only among plans that are fast enough."""
        best: Candidate | None = None
        for base in self._bases:
            counts = self._fitting_counts(base, None, host_bytes)
            if not counts:
                continue
            found = self.price(self._with(base, counts[0], host_bytes))
            if within_seconds is not None and found.time.seconds > within_seconds:
                if self.price(self._with(base, counts[-1], host_bytes)).time.seconds > within_seconds:
                    continue
                found = self._least_resident(base, counts, _ticks(within_seconds) - 1, host_bytes)
            if best is None or _size(found) < _size(best):
                best = found
        return best

    def least_host_terms(self, device_bytes: int | None) -> dict[str, int] | None:
        """Return the host terms of the plan that needs least of it within a device budget; None where none fits."""
        found = []
        for base in self._bases:
            if counts := self._fitting_counts(base, device_bytes, None):
                found.append(self.host_terms(self._memory(self._with(base, counts[-1], 0))))
        return min(found, key=lambda terms: sum(terms.values()), default=None)

    def pinning(self, **fields: Any) -> Search:
        """Return the search that leaves these fields no choice."""
        request = PlanRequest(**{**self._pinned, **fields})
        return Search(self._facts, self._numerics, self._shape, self._rates, request, self._device_type)

    def host_terms(self, memory: Prediction) -> dict[str, int]:
        """Return what a prediction takes from host memory; on the CPU that is everything."""
        terms = dict(memory.host)
        if self._device_type == "cpu":
            for name, count in memory.device.items():
                terms[name] = terms.get(name, 0) + count
        return terms

    def _time(self, plan: Plan) -> StepTime:
        return predict_step_time(
            self._facts, self._rates, self._numerics, plan, self._shape, self._device_type
        )

    def _memory(self, plan: Plan) -> Prediction:
        return predict_from_facts(self._facts, self._numerics, plan, self._shape, self._device_type)

    def _counts(self, base: Plan) -> Sequence[int]:
        """Return every number of resident blocks that is open: one or two that are left would lie in slots anyway."""
        if base.residency == "resident":
            return range(1)
        if "resident_blocks" in self._pinned:
            return range(base.resident_blocks, base.resident_blocks + 1)
        num_blocks = self._facts.num_blocks
        counts = range(base.kept_blocks, max(base.kept_blocks + 1, num_blocks - 1))
        # All of them need neither slots nor a store on the host, unless the head is streamed.
        return counts if base.head == "host" or counts[-1] == num_blocks else (*counts, num_blocks)

    def _fitting_counts(self, base: Plan, device_bytes: int | None, host_bytes: int | None) -> Sequence[int]:
        """Return the numbers of resident blocks that fit: each one more costs device memory and relieves the host."""
        counts = self._counts(base)

        def memory(count: int) -> Prediction:
            return self._memory(self._with(base, count, host_bytes))

        def too_large(count: int) -> bool:
            return device_bytes is not None and memory(count).device_bytes > device_bytes

        def enough_host(count: int) -> bool:
            return host_bytes is None or sum(self.host_terms(memory(count)).values()) <= host_bytes

        last = bisect_left(counts, True, key=too_large)
        first = bisect_left(counts, True, key=enough_host) if last else 0
        return counts[first:last]

    def _least_resident(
        self, base: Plan, counts: Sequence[int], ticks: int, host_bytes: int | None
    ) -> Candidate:
        """Return the plan with the fewest resident blocks within ``ticks``, which the last count is."""

        def fast_enough(count: int) -> bool:
            return self.price(self._with(base, count, host_bytes)).ticks <= ticks

        found = counts[bisect_left(counts[:-1], True, key=fast_enough)]
        return self.price(self._with(base, found, host_bytes))

    def _with(self, base: Plan, resident_blocks: int, host_bytes: int | None) -> Plan:
        """Return ``base`` with so many resident blocks, and as many on the disk as the host budget asks for."""
        plan = replace(base, resident_blocks=resident_blocks)
        all_resident = plan.residency == "resident" or resident_blocks >= self._facts.num_blocks
        if not self._from_disk or host_bytes is None or all_resident:
            return plan
        counts = range(1, max(2, self._facts.num_blocks - resident_blocks + 1))

        def fits(count: int) -> bool:
            memory = self._memory(replace(plan, disk_blocks=count))
            return sum(self.host_terms(memory).values()) <= host_bytes

        return replace(plan, disk_blocks=counts[bisect_left(counts[:-1], True, key=fits)])


def _ticks(seconds: float) -> int:
    return math.floor(math.log(seconds) / math.log1p(RESOLUTION))


def _keeping(base: Plan, count: int) -> Plan:
    if base.residency == "resident":
        return replace(base, kept_blocks=count)
    return replace(base, kept_blocks=count, resident_blocks=max(count, base.resident_blocks))


def _order(candidate: Candidate) -> tuple[int, int]:
    return candidate.ticks, candidate.memory.device_bytes


def _size(candidate: Candidate) -> tuple[int, int]:
    return candidate.memory.device_bytes, candidate.ticks
