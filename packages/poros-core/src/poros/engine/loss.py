"""Final norm, head and cross-entropy in fixed chunks over supervised positions; never a (B, T, V) tensor.

Shape letters: B batch, T tokens, D hidden size, V vocabulary, P supervised positions of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from poros.interfaces import MicroBatch

__all__ = ["IGNORE_INDEX", "LossHead", "Targets", "count_supervised", "make_targets"]

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


class LossHead:
    """The loss of one micro-batch and its gradient with respect to the last block's output.

    Args:
        norm: the final norm, bound to device memory.
        weight: (V, D) head matrix on the device.
        compute_dtype: dtype of the head product; the log-sum-exp runs in float32.
        chunk_positions: supervised positions per chunk. A numerics setting: chunks round by themselves.
        softcap: final soft-capping value of the logits, or None.
    """

    def __init__(
        self,
        norm: nn.Module,
        weight: torch.Tensor,
        *,
        compute_dtype: torch.dtype,
        chunk_positions: int,
        softcap: float | None,
    ) -> None:
        self.norm = norm
        self.weight = weight
        self._compute_dtype = compute_dtype
        self._chunk_positions = chunk_positions
        self._softcap = softcap

    def chunks(self, targets: Targets) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (positions, tokens) of every chunk, ascending."""
        yield from zip(
            targets.positions.split(self._chunk_positions),
            targets.tokens.split(self._chunk_positions),
            strict=True,
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 (P, V) logits of (P, D) hidden states."""
        normed = self.norm(hidden).to(self._compute_dtype)
        logits = F.linear(normed, self.weight.to(self._compute_dtype)).float()
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def chunk_loss(self, hidden: torch.Tensor, tokens: torch.Tensor, denominator: int) -> torch.Tensor:
        """Return the summed cross-entropy of (P, D) hidden states over ``denominator``, a float32 scalar."""
        return F.cross_entropy(self.logits(hidden), tokens, reduction="sum") / denominator

    def loss_and_gradient(
        self, hidden: torch.Tensor, targets: Targets, denominator: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the micro-batch's loss (its share of the step's mean) and the (B, T, D) gradient of ``hidden``.

        Args:
            hidden: (B, T, D) output of the last block.
            targets: its supervised positions.
            denominator: supervised tokens of the whole optimizer step, so that the split into micro-batches does not
                change the mean.

        Memory:
            One chunk of logits: about 14 bytes per position and vocabulary entry.
        """
        flat = hidden.reshape(-1, hidden.shape[-1])
        gradient = torch.zeros_like(flat)
        total = torch.zeros((), device=hidden.device)
        for positions, tokens in self.chunks(targets):
            chunk = flat.index_select(0, positions).requires_grad_()
            with torch.enable_grad():
                loss = self.chunk_loss(chunk, tokens, denominator)
            (chunk_gradient,) = torch.autograd.grad(loss, chunk)
            gradient.index_add_(0, positions, chunk_gradient)
            total += loss.detach()
        return total, gradient.view_as(hidden)

    @torch.no_grad()
    def loss_sum(self, hidden: torch.Tensor, targets: Targets) -> torch.Tensor:
        """Return the summed cross-entropy of a micro-batch without gradient, a float32 scalar."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        total = torch.zeros((), device=hidden.device)
        for positions, tokens in self.chunks(targets):
            total += self.chunk_loss(flat.index_select(0, positions), tokens, 1)
        return total
