"""What the planner says against what the engine does, on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from poros.parity.case_run import CaseRun, case_numerics
from poros.planning.facts import model_facts
from poros.planning.measure import measure_rates
from poros.planning.rates import Rates
from poros.planning.shape import StepShape
from poros.planning.step_time import predict_step_time
from poros.settings import Plan

ROWS = ((8,), (8,), (8,))
SHAPE = StepShape(num_micro_batches=3, micro_batch_size=1, tokens=8)


@pytest.fixture(scope="module")
def slow_compute() -> Rates:
    """A machine whose rates are round numbers."""
    return Rates(
        origin="a test",
        measured=False,
        link_bytes_per_second=1e9,
        return_bytes_per_second=1e9,
        matmul_flops_per_second=1e9,
        dequantized_weights_per_second=1e9,
        memory_bytes_per_second=1e9,
        kernel_seconds=1e-6,
        launch_seconds=1e-6,
    )


@pytest.mark.parametrize(
    "plan",
    [
        Plan(num_slots=2),
        Plan(num_slots=3),
        Plan(num_slots=2, resident_blocks=1),
        Plan(num_slots=2, resident_blocks=2),
        Plan(num_slots=2, head="host"),
        Plan(residency="resident"),
    ],
    ids=str,
)
def test_predicted_bytes_over_the_link_are_those_of_a_steady_step(
    plan: Plan, start_run: Callable[..., CaseRun], slow_compute: Rates
) -> None:
    run = start_run(plan, row_lengths=ROWS)
    run.train(2)
    run.engine.take_statistics()
    run.train(1)
    moved = run.engine.take_statistics().h2d_bytes
    numerics = case_numerics(run.case)
    facts = model_facts(run.model.meta, numerics)
    assert predict_step_time(facts, slow_compute, numerics, plan, SHAPE, "cpu").h2d_bytes == moved
    run.close()


def test_rates_of_this_cpu_are_positive_and_finite(start_run: Callable[..., CaseRun]) -> None:
    run = start_run()
    generator = torch.get_rng_state()
    rates = measure_rates(torch.device("cpu"), torch.float32, run.model.kinds[0])
    assert rates.measured
    numbers = [
        value for name in Rates.__dataclass_fields__ if isinstance(value := getattr(rates, name), float)
    ]
    assert len(numbers) == 8  # the disk is measured where a plan reads it
    assert all(value > 0 and math.isfinite(value) for value in numbers)
    assert torch.equal(torch.get_rng_state(), generator)
    run.close()
