"""What a little more memory, or another micro-batch size, would bring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from poros.errors import BudgetError
from poros.planning.planner import PlannedRun
from poros.planning.request import Budget
from poros.planning.shape import StepShape
from poros.units import GB

__all__ = ["Advice", "advise", "with_one_more_gb"]

MAX_MICRO_BATCH_SIZE = 64

MakePlan = Callable[[StepShape, Budget], PlannedRun]


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Advice next to a plan.

    Attributes:
        one_more_gb: the plan with one more GB of device memory.
        best_shape: the split of the same rows into micro-batches that is predicted to be fastest within the budget, or
            the shape that was asked about. Another split gives other bits: it is the user's choice.
    """

    one_more_gb: PlannedRun
    best_shape: PlannedRun

    @property
    def micro_batch_size(self) -> int:
        """The recommended micro-batch size."""
        return self.best_shape.shape.micro_batch_size


def advise(planned: PlannedRun, make: MakePlan) -> Advice:
    """Plan again with one more GB, and with the same rows a step in other micro-batches.

    Args:
        planned: the plan at hand.
        make: `poros.planning.planner.make_plan` for everything but shape and budget.
    """
    budget = planned.budget
    best = planned
    for shape in _other_shapes(planned.shape):
        try:
            other = make(shape, budget)
        except BudgetError:
            break  # larger micro-batches need more still
        if other.time.tokens_per_second > best.time.tokens_per_second:
            best = other
    return Advice(one_more_gb=with_one_more_gb(planned, make), best_shape=best)


def with_one_more_gb(planned: PlannedRun, make: MakePlan) -> PlannedRun:
    """Return the fastest plan with one more GB of device memory than the plan at hand may take, or takes.

    A frugal plan stops where more memory no longer pays, so that there it is what the plan takes.
    """
    budget = planned.budget
    used = planned.prediction.device_bytes if budget.frugal else budget.device_bytes
    assert used is not None, "a budget that is not frugal has a limit"
    return make(planned.shape, replace(budget, device_bytes=used + GB, frugal=False))


def _other_shapes(shape: StepShape) -> list[StepShape]:
    """Return the splits of the step's rows into micro-batches of 1, 2, 4, ... rows, ascending."""
    rows = shape.num_micro_batches * shape.micro_batch_size
    sizes = []
    size = 1
    while size <= min(rows, MAX_MICRO_BATCH_SIZE):
        if rows % size == 0 and size != shape.micro_batch_size:
            sizes.append(size)
        size *= 2
    return [replace(shape, num_micro_batches=rows // size, micro_batch_size=size) for size in sizes]
