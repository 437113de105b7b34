"""Every placement knob, one trajectory: whatever plan is drawn, the bits are those of the resident run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from poros.interfaces import ParityCase
from poros.parity.case_run import start_case
from poros.parity.compare import compare
from poros.parity.trajectory import Trajectory
from poros.plugins import load_registry
from poros.settings import ACCUMULATION_ORDERS, PLACES, Plan

NUM_DRAWS = 20

plans = st.builds(
    Plan,
    num_slots=st.integers(2, 6),
    resident_blocks=st.integers(0, 5),
    head=st.sampled_from(PLACES),
    activations=st.sampled_from(PLACES),
    order=st.sampled_from(ACCUMULATION_ORDERS),
    workspace=st.booleans(),
)


@pytest.fixture(scope="module")
def train(cpu: torch.device, tiny_case: ParityCase) -> Callable[[Plan], Trajectory]:
    registry = load_registry()

    @cache
    def run(plan: Plan) -> Trajectory:
        started = start_case(tiny_case, plan, registry, cpu)
        try:
            return started.train(tiny_case.num_steps)
        finally:
            started.close()

    return run


@settings(max_examples=NUM_DRAWS, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=plans)
def test_no_plan_changes_a_bit(plan: Plan, train: Callable[[Plan], Trajectory]) -> None:
    verdict = compare(train(Plan(residency="resident")), train(plan))
    assert verdict.outcome == "equal", verdict.detail
