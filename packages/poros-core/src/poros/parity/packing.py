"""Packed rows beside rows of their own: samples that share a row must not see each other.

Shape letters: T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from poros.engine.targets import IGNORE_INDEX
from poros.interfaces import MicroBatch
from poros.parity.case_run import CaseRun, RandomBatch

__all__ = ["PACKING_TOLERANCE", "PackedBatch", "packed_and_alone", "packing_differences"]

# One is longer than the sliding window of any config that the kit takes, one is a single token.
LENGTHS = (70, 9, 1, 31)
PADDING = 5
DATA_SEED = 12
# Float32 products of the same numbers in another order of sums, relative to the largest value compared. Measured
# 2026-11-30 on the tiny Qwen2.5, Qwen3, Gemma 3 and Gemma 4 of the gates (x86-64 CPU, torch 2.15, transformers 5.24):
# loss 1.8e-7, gradients 6.1e-7. Samples that see each other differ by 9e-4 (loss) and 0.5 (gradients).
PACKING_TOLERANCE = 2e-5


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A `MicroBatch` whose row holds several samples."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor


def packed_and_alone(vocab_size: int) -> tuple[PackedBatch, list[MicroBatch]]:
    """Return random samples twice: in one row with padding at its end, and each in a row of its own."""
    generator = torch.Generator().manual_seed(DATA_SEED)
    alone: list[MicroBatch] = []
    for length in LENGTHS:
        ids = torch.randint(1, vocab_size, (1, length), generator=generator)
        labels = ids.clone()
        labels[:, 0] = IGNORE_INDEX
        alone.append(RandomBatch(ids, labels))
    padding = torch.zeros(1, PADDING, dtype=torch.int64)
    packed = PackedBatch(
        input_ids=torch.cat([*(m.input_ids for m in alone), padding], dim=1),
        labels=torch.cat([*(m.labels for m in alone), padding + IGNORE_INDEX], dim=1),
        position_ids=torch.cat([torch.arange(length) for length in (*LENGTHS, PADDING)])[None],
    )
    return packed, alone


def packing_differences(run: CaseRun, packed: MicroBatch, alone: list[MicroBatch]) -> tuple[float, float]:
    """Return how far loss and gradients of a packed row are from the sums of its samples', relative to the largest."""
    bank = run.model.bank
    found = []
    for micro_batches in ([packed], alone):
        output = run.engine.step(micro_batches, 0)
        gradients = torch.cat([gradient.flatten() for gradient in bank.gradients.values()])
        found.append((torch.stack(output.losses).double().sum(), gradients.clone()))
    (packed_loss, packed_gradients), (loss, gradients) = found
    return (
        float((packed_loss - loss).abs() / loss.abs()),
        float((packed_gradients - gradients).abs().max() / gradients.abs().max()),
    )
