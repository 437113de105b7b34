"""Clauses about training: residency, repeatability, restart, gradient flow, and controls that must fail."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from poros.determinism import preserved_generator
from poros.parity import gates
from poros.parity.case_run import CaseRun, start_case
from poros.parity.compare import Verdict, compare
from poros.parity.faults import FAULTS
from poros.parity.gates import Oracles
from poros.run.checkpointing import find_checkpoint, restore_state, save_state
from poros.settings import ACCUMULATION_ORDERS, Plan
from poros.testing.subject import CPU, Subject, broken

__all__ = ["check_controls", "check_gradients", "check_repeatability", "check_residency", "check_restart"]

STREAMED = Plan(num_slots=2)
OTHER = Plan(num_slots=3, order=ACCUMULATION_ORDERS[1])
# Each leaves the loss of the first step right or nearly so: what a broken stream looks like from outside.
CONTROLS = ("early-refill", "skipped-accumulation")


def check_residency(subject: Subject, oracles: Oracles) -> None:
    """Every streamed plan, in both orders of accumulation, equals the truly resident run byte for byte."""
    for plan, verdict in zip(gates.STREAMED_PLANS, gates.residency(subject.case, oracles), strict=True):
        _require_equal("Streaming changes the run", verdict, plan)


def check_repeatability(subject: Subject, oracles: Oracles) -> None:
    """A second run from the same seeds gives the same bytes."""
    first, second = (oracles.train(subject.case, STREAMED) for _ in range(2))
    _require_equal("A run does not repeat itself", compare(first, second), STREAMED)


def check_restart(subject: Subject, oracles: Oracles) -> None:
    """A run that is saved half-way and continued under another plan equals the uninterrupted one."""
    case = subject.case
    with tempfile.TemporaryDirectory() as folder:
        run = _start(subject, STREAMED)
        try:
            run.train(case.num_steps // 2)
            save_state(Path(folder), run.next_step, run.engine, run.optimizer, {})
        finally:
            run.close()
        state, path, _ = find_checkpoint(Path(folder))
        run = _start(subject, OTHER)
        try:
            with preserved_generator(CPU):
                restore_state(state, run.engine, run.optimizer, path)
                run.next_step = state.step
                resumed = run.train(case.num_steps - state.step)
        finally:
            run.close()
    verdict = oracles.compare(case, resumed, first_step=state.step)
    _require_equal("A resumed run differs from the uninterrupted one", verdict, OTHER)


def check_gradients(subject: Subject, _: Oracles) -> None:
    """Fresh adapters (``lora_B`` zero): every ``lora_B`` gets a gradient, and every ``lora_A`` once B has moved."""
    run = _start(subject, STREAMED)
    try:
        bank = run.model.bank
        bank.weights["lora_B"].zero_()
        _step(run)
        _require_gradients(run, "lora_B")
        # Not the optimizer's step: its warm-up starts from a rate of zero.
        bank.weights["lora_B"].sub_(bank.gradients["lora_B"])
        _step(run)
        _require_gradients(run, "lora_A")
    finally:
        run.close()


def check_controls(subject: Subject, oracles: Oracles) -> None:
    """The comparison can fail on this config: an engine with a known fault must turn the verdict."""
    for fault in CONTROLS:
        (verdict,) = gates.residency(subject.case, oracles, [STREAMED], FAULTS[fault])
        if verdict.outcome != "different":
            raise broken(
                f"The control `{fault}` is not caught, so `equal` proves nothing here",
                expected="different",
                got=f"{verdict.outcome} {verdict.detail}".strip(),
            )


def _start(subject: Subject, plan: Plan) -> CaseRun:
    return start_case(subject.case, plan, subject.registry, CPU)


def _step(run: CaseRun) -> None:
    """Accumulate the gradients of one optimizer step without taking it."""
    run.engine.step(run.micro_batches(run.next_step), run.next_step)


def _require_gradients(run: CaseRun, group: str) -> None:
    bank = run.model.bank
    for block, tensor, gradient in bank.tensors(bank.gradients):
        if tensor.group == group and not (bool(gradient.any()) and bool(torch.isfinite(gradient).all())):
            kind = "zero" if not bool(gradient.any()) else "not finite"
            raise broken(
                "An adapter tensor gets no gradient",
                expected="a finite gradient that is not all zero",
                got=kind,
                where=f"block {block}, tensor {tensor.path}.{group}",
            )


def _require_equal(what: str, verdict: Verdict, plan: Plan) -> None:
    if verdict.outcome != "equal":
        raise broken(what, expected="equal", got=f"{verdict.outcome}: {verdict.detail}", where=f"{plan}")
