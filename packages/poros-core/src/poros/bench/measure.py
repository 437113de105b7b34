"""Measuring one spec in this process."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from poros.bench.build import make_batches, plan_run, start_run
from poros.bench.link import link_bytes_per_second
from poros.bench.memory import MemoryMeter
from poros.bench.spec import BenchSpec
from poros.bench.timing import time_steps
from poros.determinism import configure
from poros.errors import PorosError
from poros.parity.compare import compare
from poros.parity.trajectory import Trajectory
from poros.plugins import Registry, load_registry
from poros.run.device import resolve_device
from poros.settings import Plan

__all__ = ["check", "measure", "run"]


def run(values: Mapping[str, Any]) -> dict[str, Any]:
    """Run a spec given as a mapping; what `poros.bench.worker` serves."""
    spec = BenchSpec.from_mapping(values)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(
            "always", RuntimeWarning
        )  # graphs given up, memory that could not be page-locked
        facts = {"time": measure, "check": check}[spec.mode](spec)
    notes = [str(warning.message) for warning in caught if issubclass(warning.category, RuntimeWarning)]
    return facts | {"notes": notes}


def measure(spec: BenchSpec) -> dict[str, Any]:
    """Time whole optimizer steps of a spec and return what they took, in seconds and bytes.

    Must be the first thing that the process does on the device: see `MemoryMeter`.
    """
    device = resolve_device(spec.device)
    configure(device)
    registry = load_registry()
    meter = MemoryMeter(device, spec.memory_limit_bytes)
    facts = _time_plan(spec, registry, device) | meter.read()
    _free(device)
    # After the peaks were read: the probe's buffers are no part of the run.
    return facts | {"link_bytes_per_second": link_bytes_per_second(device)}


def _time_plan(spec: BenchSpec, registry: Registry, device: torch.device) -> dict[str, Any]:
    planned, numerics = plan_run(spec, registry, device), spec.make_numerics()
    bench = start_run(spec, planned.plan, registry, device)
    engine = bench.engine
    vocab_size = int(engine.model.config.vocab_size)
    # Data is drawn before the clock runs: where rows come from is not what is measured.
    batches = [make_batches(spec, vocab_size, index) for index in range(spec.warmup_steps + spec.steps)]
    last: dict[str, torch.Tensor] = {}

    def step(index: int) -> None:
        last["losses"], last["norm"] = bench.step(batches[index], index)

    times = time_steps(
        step,
        device,
        warmup_steps=spec.warmup_steps,
        steps=spec.steps,
        before_timing=lambda: _forget(engine.take_statistics()),
    )
    statistics = engine.take_statistics()
    engine.close()
    loss, norm = float(last["losses"].sum()), float(last["norm"])
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise PorosError(
            f"The last step's loss is {loss} and its gradient norm {norm}: this measures nothing."
        )
    return {
        "plan": asdict(planned.plan),
        "planned": spec.planned,
        "predicted": {
            "device_bytes": planned.prediction.device_bytes,
            "device_terms_bytes": dict(planned.prediction.device),
            "host_bytes": planned.prediction.host_bytes,
            "step_seconds": planned.time.seconds,
            "compute_seconds": planned.time.compute_seconds,
            "h2d_bytes": planned.time.h2d_bytes,
            "binding": planned.binding,
            "rates": planned.rates.origin,
        },
        "numerics": {name: str(value) for name, value in asdict(numerics).items()},
        "quantization": spec.quantization,
        "rank": spec.rank,
        "micro_batches": spec.micro_batches,
        "micro_batch_size": spec.micro_batch_size,
        "tokens": spec.tokens,
        "tokens_per_step": spec.tokens_per_step,
        **times.facts(),
        "tokens_per_second": spec.tokens_per_step / times.step_seconds,
        "h2d_bytes_per_step": statistics.h2d_bytes / spec.steps,
        "d2h_bytes_per_step": statistics.d2h_bytes / spec.steps,
        "exposed_copy_seconds": statistics.exposed_copy_seconds / spec.steps,
        "num_graphs": engine.graphs.num_graphs,
        "build_seconds": bench.build_seconds,
        "store_payload_bytes": bench.payload_bytes,
        "store_allocated_bytes": bench.allocated_bytes,
        "loss": loss,
        "grad_norm": norm,
    }


def check(spec: BenchSpec) -> dict[str, Any]:
    """Train a spec's plan and a truly resident run of the same numerics; compare every bit of every step.

    Losses, gradients, norms, weights, both moments and the generator's state are compared.
    """
    device = resolve_device(spec.device)
    configure(device)
    registry = load_registry()
    compiled = spec.make_numerics().blocks == "compiled"  # such blocks read their matrices from the workspace
    resident = Plan(residency="resident", graphs=spec.oracle_graphs, workspace=compiled)
    oracle = _trajectory(spec, resident, registry, device)
    _free(device)
    plan = plan_run(spec, registry, device).plan
    verdict = compare(oracle, _trajectory(spec, plan, registry, device))
    return {
        "plan": asdict(plan),
        "oracle_graphs": spec.oracle_graphs,
        "num_steps": spec.steps,
        "verdict": verdict.outcome,
        "detail": verdict.detail,
        "num_tensors": verdict.num_tensors,
        "oracle_finite": oracle.finite(),
    }


def _trajectory(spec: BenchSpec, plan: Plan, registry: Registry, device: torch.device) -> Trajectory:
    run = start_run(spec, plan, registry, device)
    model = run.engine.model
    trajectory = Trajectory(model.bank.signatures, kernels=model.architecture.kernels())
    bank = model.bank
    vocab_size = int(model.config.vocab_size)
    for index in range(spec.steps):
        output = run.engine.step(make_batches(spec, vocab_size, index), index)
        trajectory.record_gradients(index, torch.stack(output.losses), bank)
        norm = run.optimizer.clip()
        run.optimizer.step()
        trajectory.record_update(index, norm, bank, run.optimizer, device)
    run.engine.close()
    return trajectory


def _free(device: torch.device) -> None:
    """Give back what a finished run held: engines and their graphs refer to each other in circles."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _forget(_: object) -> None:
    """Counters are reset by being taken."""
