"""The gates: residency, repeatability, restart, plain and reference, each a function from a case to verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from poros.blocks.store import BlockStore
from poros.blocks.store_cache import StoreCache
from poros.determinism import preserved_generator
from poros.interfaces import ParityCase
from poros.parity.case_run import CaseRun, start_case
from poros.parity.compare import Verdict, compare
from poros.parity.faults import EngineMaker
from poros.parity.plain import train_plain
from poros.parity.reference import ReferenceRun
from poros.parity.trajectory import Trajectory
from poros.parity.worker import WorkerSpec, spawn_worker
from poros.plugins import Registry
from poros.settings import ACCUMULATION_ORDERS, Plan

__all__ = [
    "RESIDENT",
    "STREAMED_PLANS",
    "ReferenceDifference",
    "cached_store",
    "evaluation",
    "plain",
    "reference",
    "repeatability",
    "residency",
    "restart",
]

RESIDENT = Plan(residency="resident")

# Every placement that the residency gate walks through: slots, orders, workspace.
STREAMED_PLANS = tuple(
    Plan(num_slots=slots, order=order, workspace=workspace)
    for slots, order, workspace in [
        (2, ACCUMULATION_ORDERS[0], False),
        (3, ACCUMULATION_ORDERS[0], True),
        (2, ACCUMULATION_ORDERS[1], True),
        (3, ACCUMULATION_ORDERS[1], False),
    ]
)


def _train(
    case: ParityCase,
    plan: Plan,
    registry: Registry,
    device: torch.device,
    num_steps: int,
    make_engine: EngineMaker | None = None,
) -> Trajectory:
    run = start_case(case, plan, registry, device, make_engine=make_engine)
    try:
        return run.train(num_steps)
    finally:
        run.close()


def residency(
    case: ParityCase,
    registry: Registry,
    device: torch.device,
    plans: Sequence[Plan] = STREAMED_PLANS,
    make_engine: EngineMaker | None = None,
) -> list[Verdict]:
    """Compare each plan's run with the truly resident one, every step.

    The oracle is run twice first: if it does not repeat itself, nothing can be compared.

    Args:
        make_engine: builds the streamed engine; a fault here must turn the verdict.
    """
    oracle = _train(case, RESIDENT, registry, device, case.num_steps)
    again = compare(oracle, _train(case, RESIDENT, registry, device, case.num_steps))
    if again.outcome != "equal":
        return [Verdict("cannot compare", f"the resident run does not repeat itself: {again.detail}", 0)]
    return [
        compare(oracle, _train(case, plan, registry, device, case.num_steps, make_engine)) for plan in plans
    ]


def cached_store(case: ParityCase, registry: Registry, device: torch.device, folder: Path) -> Verdict:
    """Compare a streamed run whose store was read from the disk with the resident one that quantized by itself."""
    oracle = _train(case, RESIDENT, registry, device, case.num_steps)
    cache = StoreCache(folder)
    start_case(case, STREAMED_PLANS[0], registry, device, cache=cache).close()
    run = start_case(case, STREAMED_PLANS[0], registry, device, cache=_ReadOnlyCache(folder))
    try:
        return compare(oracle, run.train(case.num_steps))
    finally:
        run.close()


class _ReadOnlyCache(StoreCache):
    """Fails the gate if the store was not cached: quantizing again would prove nothing."""

    def save(self, key: str, store: BlockStore) -> None:
        raise AssertionError(f"store `{key}` was not found in the cache")


def plain(case: ParityCase, registry: Registry, device: torch.device) -> Verdict:
    """Compare the streamed engine with ordinary autograd over the same modules."""
    run = start_case(case, RESIDENT, registry, device)
    train_plain(run, case.num_steps)
    return compare(run.trajectory, _train(case, STREAMED_PLANS[0], registry, device, case.num_steps))


def repeatability(case: ParityCase, device: torch.device, folder: Path) -> Verdict:
    """Compare the same streamed run in two fresh processes."""
    first, second = (
        spawn_worker(
            WorkerSpec(
                case=case.name,
                plan={"num_slots": 2},
                device=str(device),
                num_steps=case.num_steps,
                output=str(folder / name),
            )
        )
        for name in ("first", "second")
    )
    return compare(first, second)


def restart(
    case: ParityCase, registry: Registry, device: torch.device, folder: Path, dropped: str | None = None
) -> Verdict:
    """Compare an uninterrupted run with one that was saved in one process and continued, under another plan, in this.

    Args:
        dropped: a moment to zero after loading: the control that must turn the verdict.
    """
    from poros.run.checkpointing import find_checkpoint, restore_state

    half = case.num_steps // 2
    spawn_worker(
        WorkerSpec(
            case=case.name,
            plan={"num_slots": 2},
            device=str(device),
            num_steps=half,
            output=str(folder),
            save=True,
        )
    )
    run = start_case(case, Plan(num_slots=3, order=ACCUMULATION_ORDERS[1]), registry, device)
    state, path, _ = find_checkpoint(folder)
    restore_state(state, run.engine, run.optimizer, path)
    if dropped is not None:
        for moment in run.optimizer.moments(dropped).values():
            moment.zero_()
    run.next_step = state.step
    with preserved_generator(device):
        resumed = run.train(case.num_steps - half)
    run.close()
    oracle = _train(case, RESIDENT, registry, device, case.num_steps)
    return compare(_without_rng(oracle.from_step(half)), _without_rng(resumed))


def _without_rng(trajectory: Trajectory) -> Trajectory:
    """Leave out the generator's state: gates of one process share the generator with whatever ran before."""
    kept = {k: v for k, v in trajectory.tensors.items() if "/rng" not in k}
    return replace(trajectory, tensors=kept)


def evaluation(case: ParityCase, registry: Registry, device: torch.device) -> Verdict:
    """Compare training with evaluations in between, one of them aborted half-way, with training alone."""
    oracle = _train(case, RESIDENT, registry, device, case.num_steps)
    run = start_case(case, Plan(num_slots=2), registry, device)
    half = case.num_steps // 2
    run.train(half)
    _abort_an_evaluation(run)
    first = run.engine.evaluate(run.micro_batches(0))
    second = run.engine.evaluate(run.micro_batches(0))
    run.train(case.num_steps - half)
    run.close()
    if first != second:
        return Verdict("different", f"two evaluations in a row: {first} against {second}", 2)
    return compare(oracle, run.trajectory)


class _AbortedError(Exception):
    pass


def _abort_an_evaluation(run: CaseRun) -> None:
    """Raise in the third visit of an evaluation, while a copy may be in flight."""
    engine = run.engine
    visit = engine._visit
    visits = iter(range(run.model.num_blocks))

    def failing_visit(*args: object) -> None:
        if next(visits) == 2:
            raise _AbortedError
        visit(*args)  # type: ignore[arg-type]

    engine._visit = failing_visit  # type: ignore[assignment,method-assign]
    try:
        engine.evaluate(run.micro_batches(0))
    except _AbortedError:
        pass
    finally:
        engine._visit = visit  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class ReferenceDifference:
    """How far Poros and the unpatched loop are apart over a case's steps.

    Attributes:
        max_loss_difference: largest difference of a step's mean loss.
        min_gradient_cosine: smallest cosine over all steps and adapter tensors.
        max_weight_difference: largest difference of any adapter weight after the last step.
    """

    max_loss_difference: float
    min_gradient_cosine: float
    max_weight_difference: float


def reference(case: ParityCase, registry: Registry, device: torch.device) -> ReferenceDifference:
    """Train the case in Poros and in an unpatched Transformers + PEFT loop and measure the distance."""
    run = start_case(case, RESIDENT, registry, device)
    other = ReferenceRun(run)
    losses, cosines = [], []
    for step in range(case.num_steps):
        theirs = other.step(step)
        run.train(1)
        ours = run.trajectory.tensors
        losses.append(abs(float(ours[f"{step}/losses"].sum() - theirs.losses.sum().cpu())))
        gradients = run.model.adapter_tensors(
            {g: ours[f"{step}/gradients/{g}"] for g in run.model.bank.gradients}
        )
        assert gradients.keys() == theirs.gradients.keys()
        cosines += [
            float(torch.cosine_similarity(gradients[name].flatten(), value.cpu().flatten(), dim=0))
            for name, value in theirs.gradients.items()
        ]
    weights = run.model.adapter_tensors()
    distance = max(float((weights[name] - value).abs().max()) for name, value in other.weights().items())
    return ReferenceDifference(max(losses), min(cosines), distance)
