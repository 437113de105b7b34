"""The clause about packed rows."""

from __future__ import annotations

from poros.parity.case_run import start_case
from poros.parity.gates import Oracles
from poros.parity.packing import PACKING_TOLERANCE, packed_and_alone, packing_differences
from poros.settings import Plan
from poros.testing.subject import CPU, Subject, broken

__all__ = ["check_packing"]


def check_packing(subject: Subject, _: Oracles) -> None:
    """The loss of a packed row is the sum of its samples' losses, and so are its gradients."""
    if not subject.architecture.packs_rows:
        return
    run = start_case(subject.case, Plan(num_slots=2), subject.registry, CPU)
    try:
        differences = packing_differences(run, *packed_and_alone(int(run.model.config.vocab_size)))
    finally:
        run.close()
    for name, difference in zip(("loss", "gradients"), differences, strict=True):
        if not difference <= PACKING_TOLERANCE:
            raise broken(
                f"Samples that share a row see each other: the {name} of a packed row",
                expected=f"the sum over its samples, to {PACKING_TOLERANCE} of the largest value",
                got=f"a difference of {difference:.2g}",
                where="packs_rows = True",
            )
