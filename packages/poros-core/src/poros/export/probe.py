"""The largest logit difference between two models on a probe, each read from its files block by block.

Shape letters: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from poros.engine.targets import IGNORE_INDEX
from poros.export.file_store import engine_over_files
from poros.model import LoadedModel
from poros.run.opening import OpenModel

__all__ = ["LogitDifference", "compare_logits", "probe_logits"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitDifference:
    """How far the merged model's answers are from those of a base with the adapter.

    Attributes:
        reference: what the merged model was compared with, in words.
        largest: largest absolute difference of two logits.
        largest_logit: largest absolute logit of the reference, for scale.
        same_choice: positions at which both choose the same next token.
        positions: T of the probe.
    """

    reference: str
    largest: float
    largest_logit: float
    same_choice: int
    positions: int


@dataclass(frozen=True, slots=True)
class _Probe:
    """One row without labels."""

    input_ids: torch.Tensor
    labels: torch.Tensor


@torch.no_grad()
def probe_logits(
    model: OpenModel,
    ids: Sequence[int],
    device: torch.device,
    fill: Callable[[LoadedModel], None] | None = None,
) -> torch.Tensor:
    """Return float32 (T, V) logits on the CPU of one forward pass.

    Args:
        model: the open model.
        ids: T tokens.
        device: where to compute.
        fill: writes the adapter; without one its product is exactly zero.
    """
    engine = engine_over_files(model, device)
    try:
        if fill is not None:
            fill(engine.model)
        row = torch.tensor([list(ids)])
        engine.evaluate([_Probe(row, torch.full_like(row, IGNORE_INDEX))])
        logits: torch.Tensor = engine.model.head.logits(engine.last_hidden(0)[0]).cpu()
    finally:
        engine.close()
    return logits


def compare_logits(merged: torch.Tensor, reference: torch.Tensor, what: str) -> LogitDifference:
    """Compare two (T, V) tables of logits."""
    return LogitDifference(
        reference=what,
        largest=float((merged - reference).abs().max()),
        largest_logit=float(reference.abs().max()),
        same_choice=int((merged.argmax(1) == reference.argmax(1)).sum()),
        positions=merged.shape[0],
    )
