"""Which positions of a micro-batch are supervised, and what each must predict.

Shape letters: B batch, T tokens, N supervised positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from poros.interfaces import MicroBatch

__all__ = ["IGNORE_INDEX", "Targets", "count_supervised", "make_targets"]

IGNORE_INDEX = -100


@dataclass(frozen=True, slots=True)
class Targets:
    """The supervised positions of one micro-batch.

    Attributes:
        positions: (N,) int64 indices into the flattened (B * T) positions, ascending.
        tokens: (N,) int64 token to predict at each.
    """

    positions: torch.Tensor
    tokens: torch.Tensor


def _shifted(labels: torch.Tensor) -> torch.Tensor:
    """Align labels to the position that predicts them; the last position predicts nothing."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def count_supervised(micro_batch: MicroBatch) -> int:
    """Return how many positions of a micro-batch carry a label. A row's first token has no position before it."""
    return int((_shifted(micro_batch.labels) != IGNORE_INDEX).sum())


def make_targets(labels: torch.Tensor, device: torch.device) -> Targets:
    """Return the supervised positions of (B, T) labels on ``device``; ``labels`` are not shifted, on the CPU."""
    flat = _shifted(labels).reshape(-1)
    positions = (flat != IGNORE_INDEX).nonzero().squeeze(1)
    return Targets(positions.to(device, non_blocking=True), flat[positions].to(device, non_blocking=True))
