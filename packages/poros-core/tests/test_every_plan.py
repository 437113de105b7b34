"""Every placement knob, one trajectory: a setting has one state hash under every plan that is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from poros.blocks.disk_ring import DiskRead, DiskRing
from poros.determinism import configure
from poros.engine.engine import Engine
from poros.parity.plan_draws import PLANS, PlanTrials, Setting, eager_cases, settings_of
from poros.plugins import Registry, load_registry
from poros.settings import Plan

# The short form of `nox -s every-plan`: 10 settings with 4 plans each.
NUM_SETTINGS, PLANS_PER_SETTING = 10, 4
GPU_SETTINGS = 8
SETTINGS = settings_of(eager_cases(load_registry()))
ONE_SETTING = Setting(case="qwen2-nf4", compute_dtype="float32", row_lengths=((6,),), dropout=False)
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> PlanTrials:
    """Runs on the CPU, over stores that the first draw of a case makes."""
    return PlanTrials(load_registry(), torch.device("cpu"), tmp_path_factory.mktemp("stores"))


@settings(max_examples=NUM_SETTINGS, deadline=None, suppress_health_check=SLOW)
@given(setting=SETTINGS, plans=st.lists(PLANS, min_size=PLANS_PER_SETTING, max_size=PLANS_PER_SETTING))
def test_a_setting_has_one_state_hash_under_every_plan(
    setting: Setting, plans: list[Plan], trials: PlanTrials, cpu: torch.device
) -> None:
    assert trials.device == cpu
    for plan in plans:
        trials.try_plan(setting, plan)


@pytest.mark.gpu
@settings(max_examples=GPU_SETTINGS, deadline=None, suppress_health_check=SLOW, derandomize=True)
@given(setting=SETTINGS, plans=st.lists(PLANS, min_size=PLANS_PER_SETTING, max_size=PLANS_PER_SETTING))
def test_the_same_settings_have_one_state_hash_on_a_gpu(
    setting: Setting, plans: list[Plan], tmp_path: Path
) -> None:
    device = torch.device("cuda", 0)
    configure(device)
    trials = PlanTrials(load_registry(), device, tmp_path)
    for plan in plans:
        trials.try_plan(setting, plan)


def test_a_plan_that_changes_a_bit_is_named_with_the_first_difference(
    registry: Registry, cpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Engine._forward

    def spoiled(self: Engine, template: object, block: int, micro_batch: int, state: object) -> None:
        forward(self, template, block, micro_batch, state)  # type: ignore[arg-type]
        if self.plan.num_slots == 5 and block == 1:
            self._activations.state(block + 1, micro_batch).mul_(1.5)

    monkeypatch.setattr(Engine, "_forward", spoiled)
    trials = PlanTrials(registry, cpu, tmp_path)
    trials.try_plan(ONE_SETTING, Plan(num_slots=2))
    with pytest.raises(AssertionError, match=r"num_slots=5.*first difference at step 0, losses"):
        trials.try_plan(ONE_SETTING, Plan(num_slots=5))
    assert (trials.draws, len(trials.plans), len(trials.hashes)) == (1, 1, 1)


def test_drawn_plans_read_the_disk_so_that_a_wrong_byte_from_it_is_found(
    registry: Registry, cpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: every bit of the blocks that come from the disk is turned round."""
    trials = PlanTrials(registry, cpu, tmp_path)
    for plan in (Plan(), Plan(disk_blocks=1)):
        trials.try_plan(ONE_SETTING, plan)
    assert (trials.draws, trials.draws_from_disk) == (2, 1)
    read = DiskRing.bytes

    def spoiled(self: DiskRing, taken: DiskRead) -> torch.Tensor:
        return read(self, taken).bitwise_not_()

    monkeypatch.setattr(DiskRing, "bytes", spoiled)
    trials.try_plan(ONE_SETTING, Plan())

    @settings(
        max_examples=NUM_SETTINGS, deadline=None, database=None, derandomize=True, phases=[Phase.generate]
    )
    @given(plan=PLANS)
    def every_plan(plan: Plan) -> None:
        trials.try_plan(ONE_SETTING, plan)

    with pytest.raises(AssertionError, match=r"disk_blocks=[1-9].*first difference"):
        every_plan()
