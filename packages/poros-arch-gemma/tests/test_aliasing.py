"""The fault that a tape across visits causes, on a tiny block; `validation/real_size.py` runs it at real sizes."""

import torch

from poros.determinism import configure
from poros.parity.case_run import start_case
from poros.plugins import load_registry
from poros.settings import Plan
from poros_quant.aliasing import MAX_FAULTY_COSINE, reproduce_aliasing


def test_a_tape_that_outlives_its_slot_has_the_right_loss_and_wrong_gradients_and_the_visit_does_not() -> (
    None
):
    device = torch.device("cpu")
    configure(device)
    registry = load_registry()
    case = registry.parity_cases()["gemma3-nf4"].value
    outcome = reproduce_aliasing(start_case(case, Plan(residency="resident"), registry, device), tokens=8)
    assert outcome.output_equal
    assert outcome.faulty_gradient_cosine < MAX_FAULTY_COSINE
    assert outcome.visit_equal
