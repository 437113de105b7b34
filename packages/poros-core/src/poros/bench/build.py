"""From a spec to an engine with random weights, an optimizer and the data of its steps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from poros.architecture import ArchitectureVerdict
from poros.bench.source import bench_source
from poros.bench.spec import BenchSpec
from poros.blocks.placement import PlacedStore
from poros.blocks.store import BlockStore
from poros.checkpoint import load_config
from poros.engine.engine import Engine
from poros.interfaces import MicroBatch, WeightFormat
from poros.model import MetaModel, load_model
from poros.optimizer import BankOptimizer
from poros.parity.case_run import RandomBatch
from poros.parity.random_model import randomize_adapters
from poros.planning.planner import PlannedRun, make_plan
from poros.planning.rates import assumed_rates
from poros.planning.request import Budget
from poros.planning.shape import StepShape
from poros.plugins import Registry
from poros.run.memory import resolve_budget
from poros.run.opening import describe_model
from poros.settings import OptimizerSettings, Plan

__all__ = ["BenchRun", "make_batches", "plan_run", "start_run"]

MODEL_SEED = 20
RUN_SEED = 7
DATA_SEED = 11
# A large rate, so that a wrong moment or a skipped step shows in the weights of the next step.
OPTIMIZER = OptimizerSettings(learning_rate=1e-3, weight_decay=0.01, schedule="constant")


@dataclass(slots=True)
class BenchRun:
    """An engine at step 0 and what it needs for whole optimizer steps.

    Attributes:
        build_seconds: what drawing, quantizing and page-locking took.
        payload_bytes, allocated_bytes: of the store in host memory.
    """

    spec: BenchSpec
    engine: Engine
    optimizer: BankOptimizer
    build_seconds: float
    payload_bytes: int
    allocated_bytes: int

    def step(self, batches: list[MicroBatch], index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run forward, backward, clipping and AdamW; return the micro-batches' losses and the gradients' norm."""
        output = self.engine.step(batches, index)
        norm = self.optimizer.clip()
        self.optimizer.step()
        return torch.stack(output.losses), norm


def make_batches(spec: BenchSpec, vocab_size: int, step: int) -> list[MicroBatch]:
    """Return the micro-batches of one step: random tokens, every position supervised, other tokens at every step."""
    generator = torch.Generator().manual_seed(DATA_SEED * 1000 + step)
    shape = (spec.micro_batch_size, spec.tokens)
    batches: list[MicroBatch] = []
    for _ in range(spec.micro_batches):
        ids = torch.randint(1, vocab_size, shape, generator=generator)
        batches.append(RandomBatch(ids, ids.clone()))
    return batches


def plan_run(spec: BenchSpec, registry: Registry, device: torch.device) -> PlannedRun:
    """Return the spec's plan, chosen or only predicted, with what it should take.

    Raises:
        BudgetError: the planner finds nothing that fits.
    """
    numerics = spec.make_numerics()
    _, _, meta = _describe(spec, registry)
    return make_plan(
        meta,
        numerics,
        StepShape(
            num_micro_batches=spec.micro_batches, micro_batch_size=spec.micro_batch_size, tokens=spec.tokens
        ),
        _budget(spec, device),
        assumed_rates(numerics.compute_dtype),
        request=spec.make_request(),
        device_type=device.type,
    )


def _budget(spec: BenchSpec, device: torch.device) -> Budget:
    """A plan that is given is only predicted; one that is chosen must fit this machine."""
    if not spec.planned:
        return Budget(frugal=False)
    return resolve_budget(device, device_bytes=spec.memory_limit_bytes, host_bytes=None)[0]


def start_run(spec: BenchSpec, plan: Plan, registry: Registry, device: torch.device) -> BenchRun:
    """Build the spec's model under ``plan`` with random weights that differ per block."""
    start = time.perf_counter()
    torch.manual_seed(RUN_SEED)
    _, weight_format, meta = _describe(spec, registry)
    model = load_model(
        meta,
        source=bench_source(meta, MODEL_SEED, device),
        weight_format=weight_format,
        numerics=spec.make_numerics(),
        plan=plan,
        device=device,
        seed=RUN_SEED,
    )
    randomize_adapters(model.bank, MODEL_SEED)
    engine = Engine(model, plan, seed=RUN_SEED)
    optimizer = BankOptimizer(model.bank, OPTIMIZER, num_training_steps=1000)
    payload, allocated = _host_store_bytes(model.store)
    return BenchRun(spec, engine, optimizer, time.perf_counter() - start, payload, allocated)


def _describe(spec: BenchSpec, registry: Registry) -> tuple[ArchitectureVerdict, WeightFormat, MetaModel]:
    return describe_model(
        load_config(Path(spec.model)),
        quantization=spec.quantization,
        lora=spec.make_lora(),
        numerics=spec.make_numerics(),
        registry=registry,
    )


def _host_store_bytes(store: BlockStore) -> tuple[int, int]:
    """Return what the host holds of the store: bytes of its blocks, and bytes taken for them."""
    if not isinstance(store, PlacedStore):
        return 0, 0
    return sum(layout.num_bytes for layout in store._host.layouts), store._host.arena.total_bytes
