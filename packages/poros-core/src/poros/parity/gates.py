"""The gates: residency, repeatability, restart, plain and reference, each a function from a case to verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

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
    "Oracles",
    "ReferenceDifference",
    "cached_store",
    "disk_tier",
    "evaluation",
    "plain",
    "reference",
    "repeatability",
    "residency",
    "restart",
    "save_half",
]

RESIDENT = Plan(residency="resident")

# Every placement that the residency gate walks through: slots, orders, workspace, resident and kept blocks, head,
# activations.
STREAMED_PLANS = (
    Plan(num_slots=2),
    Plan(num_slots=3, workspace=True, resident_blocks=1, kept_blocks=1, head="host"),
    Plan(num_slots=2, activations="host", graphs=False),
    Plan(num_slots=2, order=ACCUMULATION_ORDERS[1], workspace=True, activations="host"),
    Plan(
        num_slots=3, order=ACCUMULATION_ORDERS[1], resident_blocks=2, kept_blocks=1, head="host", graphs=False
    ),
)

# Blocks from the disk between resident ones and those in host memory, and all of them.
DISK_PLANS = (
    Plan(num_slots=3, resident_blocks=1, disk_blocks=2, head="host", workspace=True),
    Plan(num_slots=2, disk_blocks=10**6, activations="host", order=ACCUMULATION_ORDERS[1]),
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


class Oracles:
    """The truly resident runs that gates compare with, each made once and only if it repeats itself."""

    def __init__(self, registry: Registry, device: torch.device) -> None:
        self.registry = registry
        self.device = device
        self._made: dict[tuple[str, int], tuple[Trajectory, Verdict]] = {}

    def train(
        self, case: ParityCase, plan: Plan = RESIDENT, make_engine: EngineMaker | None = None
    ) -> Trajectory:
        """Train the case under ``plan`` for its steps."""
        return _train(case, plan, self.registry, self.device, case.num_steps, make_engine)

    def compare(self, case: ParityCase, candidate: Trajectory, first_step: int = 0) -> Verdict:
        """Compare a run with the oracle from ``first_step`` on.

        The oracle is run twice first: if it does not repeat itself, nothing can be compared.
        """
        key = (case.name, case.num_steps)
        if key not in self._made:
            oracle = self.train(case)
            self._made[key] = oracle, compare(oracle, self.train(case))
        oracle, repeats = self._made[key]
        if repeats.outcome != "equal":
            return Verdict("cannot compare", f"the resident run does not repeat itself: {repeats.detail}", 0)
        return compare(oracle.from_step(first_step), candidate)


def residency(
    case: ParityCase,
    oracles: Oracles,
    plans: Sequence[Plan] = STREAMED_PLANS,
    make_engine: EngineMaker | None = None,
) -> list[Verdict]:
    """Compare each plan's run with the truly resident one, every step.

    Args:
        make_engine: builds the streamed engine; a fault here must turn the verdict.
    """
    return [oracles.compare(case, oracles.train(case, plan, make_engine)) for plan in plans]


def cached_store(case: ParityCase, oracles: Oracles, folder: Path) -> Verdict:
    """Compare a streamed run whose store was read from the disk with the resident one that quantized by itself."""
    registry, device = oracles.registry, oracles.device
    start_case(case, STREAMED_PLANS[0], registry, device, cache=StoreCache(folder)).close()
    run = start_case(case, STREAMED_PLANS[0], registry, device, cache=_ReadOnlyCache(folder))
    try:
        return oracles.compare(case, run.train(case.num_steps))
    finally:
        run.close()


def disk_tier(case: ParityCase, oracles: Oracles, folder: Path) -> list[Verdict]:
    """Compare runs whose blocks come from the disk, some or all of them, with the resident one.

    The first run makes the store, the second one finds it.
    """
    registry, device = oracles.registry, oracles.device
    verdicts = []
    for plan, cache in zip(DISK_PLANS, (StoreCache(folder), _ReadOnlyCache(folder)), strict=True):
        run = start_case(case, plan, registry, device, cache=cache)
        try:
            verdicts.append(oracles.compare(case, run.train(case.num_steps)))
            assert run.engine.take_statistics().disk_bytes > 0, "nothing came from the disk"
        finally:
            run.close()
    return verdicts


class _ReadOnlyCache(StoreCache):
    """Fails the gate if the store was not cached: quantizing again would prove nothing."""

    def save(self, key: str, *given: object) -> None:
        raise AssertionError(f"store `{key}` was not found in the cache")

    def fill(self, key: str, *given: object) -> None:
        raise AssertionError(f"store `{key}` was not found in the cache")


def plain(case: ParityCase, oracles: Oracles) -> Verdict:
    """Compare ordinary autograd over the same modules with the engine's resident run."""
    run = start_case(case, RESIDENT, oracles.registry, oracles.device)
    train_plain(run, case.num_steps)
    return oracles.compare(case, run.trajectory)


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


def save_half(case: ParityCase, device: torch.device, folder: Path) -> None:
    """Train the first half of a case in a fresh process and save a checkpoint into ``folder``."""
    spawn_worker(
        WorkerSpec(
            case=case.name,
            plan={"num_slots": 2},
            device=str(device),
            num_steps=case.num_steps // 2,
            output=str(folder),
            save=True,
        )
    )


def restart(case: ParityCase, oracles: Oracles, folder: Path, dropped: str | None = None) -> Verdict:
    """Continue `save_half`'s checkpoint under another plan and compare with the uninterrupted run.

    Args:
        dropped: a moment to zero after loading: the control that must turn the verdict.
    """
    from poros.run.checkpointing import find_checkpoint, restore_state

    plan = Plan(num_slots=3, order=ACCUMULATION_ORDERS[1])
    run = start_case(case, plan, oracles.registry, oracles.device)
    state, path, _ = find_checkpoint(folder)
    with preserved_generator(oracles.device):
        restore_state(state, run.engine, run.optimizer, path)
        if dropped is not None:
            for moment in run.optimizer.moments(dropped).values():
                moment.zero_()
        run.next_step = state.step
        resumed = run.train(case.num_steps - state.step)
    run.close()
    return oracles.compare(case, resumed, first_step=state.step)


def evaluation(case: ParityCase, oracles: Oracles) -> Verdict:
    """Compare training with evaluations in between, one of them aborted half-way, with training alone."""
    run = start_case(case, Plan(num_slots=2), oracles.registry, oracles.device)
    half = case.num_steps // 2
    run.train(half)
    _abort_an_evaluation(run)
    first = run.engine.evaluate(run.micro_batches(0))
    second = run.engine.evaluate(run.micro_batches(0))
    run.train(case.num_steps - half)
    run.close()
    if first != second:
        return Verdict("different", f"two evaluations in a row: {first} against {second}", 2)
    return oracles.compare(case, run.trajectory)


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
    else:
        raise AssertionError("the evaluation was not aborted: the gate would prove less than it says")
    finally:
        engine._visit = visit  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class ReferenceDifference:
    """How far Poros and the unpatched loop are apart over a case's steps.

    Attributes:
        max_loss_difference: largest difference of a step's mean loss.
        first_gradient_cosine: smallest cosine of an adapter tensor's gradient in the first step, from equal weights.
        min_gradient_cosine: the same over all steps. In 16 bits it says more about Adam than about gradients: its first
            updates follow the sign of every element, so that elements near zero part at once.
        max_weight_difference: largest difference of any adapter weight after the last step.
    """

    max_loss_difference: float
    first_gradient_cosine: float
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
    first = min(cosines[: len(cosines) // case.num_steps])
    return ReferenceDifference(max(losses), first, min(cosines), distance)
