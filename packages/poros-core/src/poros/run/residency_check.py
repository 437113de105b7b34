"""A short streamed-against-resident comparison on the user's own model and rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from poros.engine.engine import Engine
from poros.interfaces import StepSource
from poros.optimizer import BankOptimizer, check_optimizer
from poros.parity.compare import Verdict, compare
from poros.parity.trajectory import Trajectory
from poros.run.opening import OpenModel
from poros.settings import OptimizerSettings, Plan

__all__ = ["compare_residencies"]


def compare_residencies(
    model: OpenModel,
    steps: StepSource,
    *,
    num_steps: int,
    device: torch.device,
    seed: int,
    optimizer: OptimizerSettings,
    streamed: Plan | None = None,
    cache_dir: Path | None = None,
) -> Verdict:
    """Train a few steps streamed, streamed again and resident, and compare every byte of the three.

    Losses, gradients, adapter weights, both moments, the generator's state and the position are compared after every
    step. If the two streamed runs differ, the machine does not repeat itself and the verdict is ``cannot compare``.

    Args:
        model: an open model.
        steps: the rows of its run.
        num_steps: optimizer steps of each of the three runs.
        device, seed, optimizer: as in the run.
        streamed: plan of the streamed runs.
        cache_dir: folder for quantized stores.

    Memory:
        One store at a time; the resident one lies on the device.
    """
    check_optimizer(optimizer, steps.num_steps)
    streamed = streamed or Plan()
    resident = Plan(residency="resident", order=streamed.order)

    def record(plan: Plan, times: int) -> list[Trajectory]:
        engine = model.load(plan=plan, device=device, seed=seed, cache_dir=cache_dir)
        try:
            initial = {group: weights.clone() for group, weights in engine.model.bank.weights.items()}
            return [_record(engine, initial, steps, num_steps, optimizer) for _ in range(times)]
        finally:
            engine.close()

    first, again = record(streamed, 2)
    (oracle,) = record(resident, 1)
    repeated = compare(first, again)
    if repeated.outcome != "equal":
        return Verdict("cannot compare", f"two streamed runs differ: {repeated.detail}", repeated.num_tensors)
    return compare(oracle, first)


def _record(
    engine: Engine,
    initial: Mapping[str, torch.Tensor],
    steps: StepSource,
    num_steps: int,
    settings: OptimizerSettings,
) -> Trajectory:
    """Train from the initial adapter and return everything that came to be."""
    bank = engine.model.bank
    for group, weights in bank.weights.items():
        weights.copy_(initial[group])
    optimizer = BankOptimizer(bank, settings, steps.num_steps)
    trajectory = Trajectory(bank.signatures, kernels=engine.model.architecture.kernels())
    for index in range(num_steps):
        output = engine.step(steps.step(index), index)
        trajectory.record_gradients(index, torch.stack(output.losses), bank)
        norm = optimizer.clip()
        optimizer.step()
        trajectory.record_update(index, norm, bank, optimizer, engine.device)
    return trajectory
