"""Running a parity case under a plan and recording its trajectory.

Shape letters: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from poros.blocks.store_cache import StoreCache
from poros.engine.engine import Engine
from poros.engine.targets import IGNORE_INDEX
from poros.interfaces import MicroBatch, ParityCase, WeightFormat
from poros.model import LoadedModel, MetaModel, load_model, make_meta_model
from poros.optimizer import BankOptimizer
from poros.parity.random_model import RandomSource, randomize_adapters, zero_centred_norms
from poros.parity.trajectory import Trajectory
from poros.plugins import Registry
from poros.settings import LoraSettings, Numerics, OptimizerSettings, Plan

__all__ = ["CaseRun", "RandomBatch", "case_micro_batches", "start_case"]

MODEL_SEED = 20
RUN_SEED = 7
DATA_SEED = 11

# A large rate and decay, so that a wrong moment or a skipped step shows in the weights at once.
OPTIMIZER = OptimizerSettings(learning_rate=1e-3, weight_decay=0.01, schedule="cosine", warmup_steps=1)


@dataclass(frozen=True, slots=True)
class RandomBatch:
    """A `MicroBatch` of random tokens, right-padded; a random prefix of every row is not supervised."""

    input_ids: torch.Tensor
    labels: torch.Tensor


def case_micro_batches(case: ParityCase, vocab_size: int, step: int) -> list[MicroBatch]:
    """Return the micro-batches of one step, other tokens at every step."""
    generator = torch.Generator().manual_seed(DATA_SEED * 1000 + step)
    batches: list[MicroBatch] = []
    for lengths in case.row_lengths:
        width = -(-max(lengths) // case.length_bucket) * case.length_bucket
        ids = torch.zeros(len(lengths), width, dtype=torch.int64)
        labels = torch.full_like(ids, IGNORE_INDEX)
        for row, length in enumerate(lengths):
            ids[row, :length] = torch.randint(1, vocab_size, (length,), generator=generator)
            start = int(torch.randint(0, max(1, length // 2), (1,), generator=generator))
            labels[row, start:length] = ids[row, start:length]
        batches.append(RandomBatch(ids, labels))
    return batches


@dataclass(slots=True)
class CaseRun:
    """A case under one plan, ready to be stepped."""

    case: ParityCase
    model: LoadedModel
    engine: Engine
    optimizer: BankOptimizer
    trajectory: Trajectory
    next_step: int = 0

    def train(self, num_steps: int) -> Trajectory:
        """Run ``num_steps`` optimizer steps, record each, and return the trajectory so far."""
        for _ in range(num_steps):
            output = self.engine.step(self.micro_batches(self.next_step), self.next_step)
            self.update(torch.stack(output.losses))
        return self.trajectory

    def update(self, losses: torch.Tensor) -> None:
        """Record gradients, clip, step the optimizer, record the rest."""
        bank = self.model.bank
        self.trajectory.record_gradients(self.next_step, losses, bank)
        norm = self.optimizer.clip()
        self.optimizer.step()
        self.trajectory.record_update(self.next_step, norm, bank, self.optimizer, self.model.device)
        self.next_step += 1

    def micro_batches(self, step: int) -> Sequence[MicroBatch]:
        """Return the step's data."""
        return case_micro_batches(self.case, int(self.model.config.vocab_size), step)

    def close(self) -> None:
        """Release page locks."""
        self.engine.close()


def case_numerics(case: ParityCase) -> Numerics:
    """Return the case's numerics."""
    return Numerics(
        compute_dtype=case.compute_dtype,
        length_bucket=case.length_bucket,
        loss_chunk_positions=case.loss_chunk_positions,
        loss_chunk_vocabulary=case.loss_chunk_vocabulary,
        blocks=case.blocks,
        neftune_alpha=case.neftune_alpha,
    )


def case_optimizer(case: ParityCase) -> OptimizerSettings:
    """Return the case's optimizer settings."""
    return replace(OPTIMIZER, **case.optimizer)


def case_meta(case: ParityCase, registry: Registry) -> tuple[MetaModel, WeightFormat]:
    """Return the case's meta model and weight format."""
    weight_format = registry.weight_formats[case.weight_format].value()
    meta = make_meta_model(
        architecture=registry.architectures[case.architecture].value(),
        config=case.make_config(),
        weight_format=weight_format,
        lora=LoraSettings(**case.lora),
        numerics=case_numerics(case),
    )
    return meta, weight_format


def case_source(
    meta: MetaModel, device: torch.device, factors: Mapping[str, float] | None = None
) -> RandomSource:
    """Return a case's random checkpoint; ``factors`` are the case's `weight_factors`."""
    module = meta.architecture.build(meta.config)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    names = {name: shapes[name] for name in meta.tensor_names}
    return RandomSource(names, MODEL_SEED, device, zero_centred_norms(module), factors)


def start_case(
    case: ParityCase,
    plan: Plan,
    registry: Registry,
    device: torch.device,
    *,
    make_engine: Callable[[LoadedModel, Plan], Engine] | None = None,
    cache: StoreCache | None = None,
) -> CaseRun:
    """Build the case's model under ``plan`` and return it at step 0.

    Args:
        make_engine: builds another engine than the real one, to inject a fault.
        cache: where the quantized store comes from, if it is there.
    """
    torch.manual_seed(RUN_SEED)
    meta, weight_format = case_meta(case, registry)
    model = load_model(
        meta,
        source=case_source(meta, device, case.weight_factors),
        weight_format=weight_format,
        numerics=case_numerics(case),
        plan=plan,
        device=device,
        seed=RUN_SEED,
        cache=cache,
    )
    randomize_adapters(model.bank, MODEL_SEED)
    engine = Engine(model, plan, seed=RUN_SEED) if make_engine is None else make_engine(model, plan)
    optimizer = BankOptimizer(model.bank, case_optimizer(case), num_training_steps=case.num_steps * 2)
    return CaseRun(
        case,
        model,
        engine,
        optimizer,
        Trajectory(model.bank.signatures, kernels=model.architecture.kernels()),
    )
