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

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from poros.engine.targets import Targets
from poros.errors import UserError, explain

__all__ = ["LossHead", "RunningLoss", "eager_terms", "is_fused"]

Terms = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def eager_terms(
    logits: torch.Tensor,
    own: torch.Tensor,
    maximum: torch.Tensor,
    others: torch.Tensor,
    target_logits: torch.Tensor,
    *,
    softcap: float | None,
    training: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a (P, C) chunk of logits to the running state of its positions, in place.

    Args:
        logits: products of the head in the compute dtype, before soft-capping. May be overwritten.
        own: (P,) the column of each position's target, -1 where it lies in another chunk.
        maximum: (P,) the largest logit so far, float32.
        others: (P,) the sum of exponentials of all but the target, relative to it.
        target_logits: (P,) the target's logit, once it has been met.
        softcap: of the logits, or None.
        training: whether the gradient follows.

    Returns:
        The (P, C) weights of the head's rows in the gradient, in the compute dtype (of no use without training), and by
        how much earlier sums (P,) shrink.
    """
    dtype = logits.dtype
    logits = capped_logits(logits, softcap)
    inside, local = own >= 0, own.clamp(min=0)[:, None]
    target_logits.copy_(torch.where(inside, logits.gather(1, local).squeeze(1), target_logits))
    before = maximum.clone()
    torch.maximum(before, logits.amax(1), out=maximum)
    slope = None if softcap is None or not training else 1 - (logits / softcap).square()
    exponentials = logits.sub_(maximum[:, None]).exp_()
    # A scatter would do, but its deterministic form on a GPU sorts.
    exponentials.masked_fill_(_columns(logits.shape[1], logits.device) == own[:, None], 0)
    decay = (before - maximum).exp_()
    others.mul_(decay).add_(exponentials.sum(1))
    if slope is not None:
        exponentials.mul_(slope)
    return exponentials.to(dtype) if training else exponentials, decay


@functools.lru_cache(maxsize=8)  # whole chunks and the last one, per device
def _columns(count: int, device: torch.device) -> torch.Tensor:
    """Return the numbers of a chunk's columns; every chunk of every step asks for the same."""
    return torch.arange(count, device=device)


def capped_logits(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Return float32 logits, soft-capped."""
    logits = logits.float()
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def is_fused(blocks: str, device_type: str) -> bool:
    """Whether runs with such blocks make every chunk's terms in one kernel: where Inductor needs Triton as well."""
    return blocks == "compiled" and device_type == "cuda"


def _fused_terms() -> Terms:
    try:
        from poros.engine.loss_kernel import fused_terms
    except ImportError as error:
        raise UserError(
            explain(
                "Cannot compile the loss",
                expected="Triton, which comes with torch on Linux",
                got=str(error),
                where="numerics.blocks",
                next_step="Use `blocks: eager`, or install Triton for this torch",
            )
        ) from error
    return fused_terms


class LossHead:
    """The final norm and the head matrix, and how their loss is chunked.

    Attributes:
        sizes, starts: per vocabulary chunk, its entries and its first one; (chunks, 1) int64 on the device.

    Args:
        norm: the final norm, bound to device memory.
        chunks: the (V, D) head matrix cut into (C, D) vocabulary chunks, ascending, on the device or in host memory.
        compute_dtype: dtype of the products; exponentials and sums run in float32.
        chunk_positions: supervised positions per product. A numerics setting, as the vocabulary chunks are: chunks
            round by themselves.
        softcap: final soft-capping value of the logits, or None.
        fused: every chunk's terms in one kernel (`poros.engine.loss_kernel`), which rounds its sums differently.
    """

    def __init__(
        self,
        norm: nn.Module,
        chunks: Sequence[torch.Tensor],
        *,
        compute_dtype: torch.dtype,
        chunk_positions: int,
        softcap: float | None,
        fused: bool = False,
    ) -> None:
        self.norm = norm
        self.chunks = tuple(chunks)
        self.compute_dtype = compute_dtype
        self.chunk_positions = chunk_positions
        self.softcap = softcap
        self.terms = _fused_terms() if fused else eager_terms
        device = next(norm.parameters()).device
        sizes = torch.tensor([chunk.shape[0] for chunk in self.chunks])
        self.sizes = sizes[:, None].to(device)
        self.starts = (sizes.cumsum(0) - sizes)[:, None].to(device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 (P, V) logits of (P, D) hidden states. For a few positions: the result is not chunked."""
        normed = self.norm(hidden).to(self.compute_dtype)
        return torch.cat(
            [self.chunk_logits(normed, chunk.to(hidden.device)) for chunk in self.chunks], dim=-1
        )

    def chunk_logits(self, normed: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return float32 (P, C) logits of (P, D) normed hidden states against (C, D) head rows."""
        return capped_logits(F.linear(normed, weight.to(self.compute_dtype)), self.softcap)

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
            About 12 bytes per logit of one chunk (fused: those of the compute dtype), and four (N, D) matrices, one of
            them in float32.
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
        # Where each target lies in each chunk, -1 where it does not.
        local = targets.tokens - head.starts
        self._own = torch.where((local >= 0) & (local < head.sizes), local, -1)
        self._maximum = torch.full((count,), -torch.inf, dtype=torch.float32, device=device)
        self._others = torch.zeros(count, dtype=torch.float32, device=device)
        self._target_logits = torch.zeros(count, dtype=torch.float32, device=device)
        if training:
            self._sums = torch.zeros(count, hidden.shape[-1], dtype=torch.float32, device=device)
            self._target_rows = torch.zeros_like(self._normed)

    @torch.no_grad()
    def add_chunk(self, index: int, weight: torch.Tensor) -> None:
        """Add the vocabulary chunk ``index``, whose (C, D) head rows are on the device."""
        weight = weight.to(self._head.compute_dtype)
        for start in range(0, len(self._maximum), self._head.chunk_positions):
            self._add(index, weight, slice(start, start + self._head.chunk_positions))

    def _add(self, index: int, weight: torch.Tensor, rows: slice) -> None:
        head, own = self._head, self._own[index, rows]
        logits = F.linear(self._normed[rows].detach(), weight)
        weights, decay = head.terms(
            logits,
            own,
            self._maximum[rows],
            self._others[rows],
            self._target_logits[rows],
            softcap=head.softcap,
            training=self._training,
        )
        if self._training:
            self._sums[rows].mul_(decay[:, None]).add_(weights @ weight)
            targets = weight.index_select(0, own.clamp(min=0))
            self._target_rows[rows] = torch.where((own >= 0)[:, None], targets, self._target_rows[rows])

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
