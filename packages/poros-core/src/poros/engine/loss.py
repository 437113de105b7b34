"""Final norm, head and cross-entropy in fixed chunks of positions and vocabulary; never a (B, T, V) tensor.

One pass over the vocabulary serves the loss and its gradient: sums of exponentials are kept relative to a running
maximum and rescaled when it grows, as FlashAttention does with its output (Dao et al. 2022, algorithm 1,
arXiv:2205.14135). The head's rows are read once, wherever they live, and no product is computed twice.

The target's own term is kept apart: its share ``p - 1`` is the negated share of all others, which is exact where the
model is sure of itself; a difference of sums in 16 bits would leave only rounding there.

Shape letters: B batch, T tokens, D hidden size, V vocabulary, C entries of one vocabulary chunk, N supervised
positions, P positions of one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from poros.engine.targets import Targets

__all__ = ["LossHead", "RunningLoss"]


class LossHead:
    """The final norm and the head matrix, and how their loss is chunked.

    Attributes:
        sizes, starts: per vocabulary chunk, its entries and its first one; (chunks, 1) int64 on the device.
        columns: the numbers of a chunk's entries, (C,) int64 on the device.

    Args:
        norm: the final norm, bound to device memory.
        chunks: the (V, D) head matrix cut into (C, D) vocabulary chunks, ascending, on the device or in host memory.
        compute_dtype: dtype of the products; exponentials and sums run in float32.
        chunk_positions: supervised positions per product. A numerics setting, as the vocabulary chunks are: chunks
            round by themselves.
        softcap: final soft-capping value of the logits, or None.
    """

    def __init__(
        self,
        norm: nn.Module,
        chunks: Sequence[torch.Tensor],
        *,
        compute_dtype: torch.dtype,
        chunk_positions: int,
        softcap: float | None,
    ) -> None:
        self.norm = norm
        self.chunks = tuple(chunks)
        self.compute_dtype = compute_dtype
        self.chunk_positions = chunk_positions
        self.softcap = softcap
        device = next(norm.parameters()).device
        sizes = torch.tensor([chunk.shape[0] for chunk in self.chunks])
        self.sizes = sizes[:, None].to(device)
        self.columns = torch.arange(int(sizes.max()), device=device)
        self.starts = (sizes.cumsum(0) - sizes)[:, None].to(device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 (P, V) logits of (P, D) hidden states. For a few positions: the result is not chunked."""
        normed = self.norm(hidden).to(self.compute_dtype)
        return torch.cat(
            [self.chunk_logits(normed, chunk.to(hidden.device)) for chunk in self.chunks], dim=-1
        )

    def chunk_logits(self, normed: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return float32 (P, C) logits of (P, D) normed hidden states against (C, D) head rows."""
        logits = F.linear(normed, weight.to(self.compute_dtype)).float()
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

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
            About 12 bytes per logit of one chunk, and four (N, D) matrices, one of them in float32.
        """
        running = self._run(RunningLoss(self, hidden, targets, denominator, training=True))
        return running.loss(), running.gradient()

    def loss_sum(self, hidden: torch.Tensor, targets: Targets) -> torch.Tensor:
        """Return the summed cross-entropy of a micro-batch without gradient, a float32 scalar."""
        return self._run(RunningLoss(self, hidden, targets, denominator=1, training=False)).loss()

    def _run(self, running: RunningLoss) -> RunningLoss:
        for index, weight in enumerate(self.chunks):
            running.add_chunk(index, weight)
        return running


class RunningLoss:
    """The loss of one micro-batch while the vocabulary goes by. Every chunk must be added once, in ascending order.

    Args:
        head: what the loss is made with.
        hidden: (B, T, D) output of the last block.
        targets: its supervised positions.
        denominator: the loss is divided by it.
        training: also keep what the gradient needs.
    """

    def __init__(
        self, head: LossHead, hidden: torch.Tensor, targets: Targets, denominator: int, *, training: bool
    ) -> None:
        self._head = head
        self._targets = targets
        self._denominator = denominator
        self._training = training
        self._shape = hidden.shape
        flat = hidden.reshape(-1, hidden.shape[-1])
        self._leaf = flat.index_select(0, targets.positions).requires_grad_(training)
        with torch.set_grad_enabled(training):
            self._normed = head.norm(self._leaf).to(head.compute_dtype)
        device, count = hidden.device, targets.tokens.numel()
        # Where each target lies in each chunk, and whether it does.
        local = targets.tokens - head.starts
        self._inside = (local >= 0) & (local < head.sizes)
        self._local = torch.where(self._inside, local, 0)
        self._maximum = torch.full((count,), -torch.inf, device=device)
        self._others = torch.zeros(count, device=device)
        self._target_logits = torch.zeros(count, device=device)
        if training:
            self._sums = torch.zeros(count, hidden.shape[-1], device=device)
            self._target_rows = torch.zeros_like(self._normed)

    @torch.no_grad()
    def add_chunk(self, index: int, weight: torch.Tensor) -> None:
        """Add the vocabulary chunk ``index``, whose (C, D) head rows are on the device."""
        weight = weight.to(self._head.compute_dtype)
        for start in range(0, len(self._maximum), self._head.chunk_positions):
            self._add(index, weight, slice(start, start + self._head.chunk_positions))

    def _add(self, index: int, weight: torch.Tensor, rows: slice) -> None:
        head = self._head
        logits = head.chunk_logits(self._normed[rows].detach(), weight)
        inside, local = self._inside[index, rows], self._local[index, rows, None]
        found = logits.gather(1, local).squeeze(1)
        self._target_logits[rows] = torch.where(inside, found, self._target_logits[rows])
        maximum = torch.maximum(self._maximum[rows], logits.amax(1))
        slope = None if head.softcap is None or not self._training else 1 - (logits / head.softcap).square()
        exponentials = logits.sub_(maximum[:, None]).exp_()
        # A scatter would do, but its deterministic form on a GPU sorts.
        columns = head.columns[: exponentials.shape[1]]
        exponentials.masked_fill_(columns == torch.where(inside, local.squeeze(1), -1)[:, None], 0)
        decay = (self._maximum[rows] - maximum).exp_()
        self._others[rows] = self._others[rows] * decay + exponentials.sum(1)
        self._maximum[rows] = maximum
        if self._training:
            if slope is not None:
                exponentials.mul_(slope)
            product = exponentials.to(head.compute_dtype) @ weight
            self._sums[rows].mul_(decay[:, None]).add_(product)
            targets = weight.index_select(0, local.squeeze(1))
            self._target_rows[rows] = torch.where(inside[:, None], targets, self._target_rows[rows])

    @torch.no_grad()
    def loss(self) -> torch.Tensor:
        """Return the summed cross-entropy over the denominator, a float32 scalar."""
        losses = self._total().log_() + self._maximum - self._target_logits
        return losses.sum() / self._denominator

    def gradient(self) -> torch.Tensor:
        """Return the (B, T, D) gradient of the loss with respect to ``hidden``; zero where nothing is supervised."""
        with torch.no_grad():
            total, share = self._total(), self._others
            if self._head.softcap is not None:
                share = share * (1 - (self._target_logits / self._head.softcap).square())
            sums = self._sums.sub_(share[:, None] * self._target_rows)
            sums.div_((total * self._denominator)[:, None])
        (rows,) = torch.autograd.grad(self._normed, self._leaf, sums.to(self._normed.dtype))
        gradient = torch.zeros(self._shape, dtype=rows.dtype, device=rows.device)
        gradient.view(-1, self._shape[-1]).index_copy_(0, self._targets.positions, rows)
        return gradient

    def _total(self) -> torch.Tensor:
        return self._others + (self._target_logits - self._maximum).exp_()
