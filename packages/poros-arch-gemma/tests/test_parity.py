"""The parity gates of the Gemma architectures. ``--tier gpu`` runs the same cases on a GPU."""

from dataclasses import replace

import pytest

from poros.interfaces import ParityCase
from poros.parity import gates
from poros.parity.faults import STATE_FAULTS
from poros.parity.pytest_gates import NUM_CONTROL_STEPS, ParityGates
from poros.settings import Plan
from poros_arch_gemma.parity_cases import PARITY_CASES


class TestGemma3(ParityGates):
    architecture = "gemma3"
    all_cases = PARITY_CASES


class TestGemma4(ParityGates):
    architecture = "gemma4"
    all_cases = PARITY_CASES
    # Its steps are long: one case goes through the gates that start processes or inject timing.
    repeated = ("-nf4-sparse-dropout",)

    @pytest.mark.parametrize("fault", STATE_FAULTS)
    def test_a_fault_of_shared_states_is_caught(
        self, float32_case: ParityCase, fault: str, oracles: gates.Oracles
    ) -> None:
        case = replace(float32_case, num_steps=NUM_CONTROL_STEPS)
        (verdict,) = gates.residency(case, oracles, [Plan(num_slots=2)], STATE_FAULTS[fault])
        assert verdict.outcome == "different", f"{fault}: {verdict}"
        # The silent kind: the loss of the step is still right.
        assert verdict.detail.startswith("first difference at step 0, gradients"), verdict.detail
