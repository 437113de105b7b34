"""A block visit and the chunked loss as nodes of autograd's graph.

What a node keeps is what its recompute needs and nothing that a slot holds: the block's input, what else it reads, and
the adapter's parameters. Autograd checks by itself that none of these was changed in place in between.

Shape letters: B batch, T tokens, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from poros.engine.loss import LossHead
from poros.engine.targets import Targets
from poros.torch_module.visits import BlockVisits, VisitCall

__all__ = ["BlockVisit", "ChunkedLoss"]


class BlockVisit(torch.autograd.Function):
    """One block: forward without a tape, backward with a recompute in a visit of its own.

    A tape over the forward would hold views of the slot, which the next block overwrites: gradients would be made from
    another block's weights, without an error.
    """

    @staticmethod
    def forward(
        ctx: Any, visits: BlockVisits, call: VisitCall, hidden: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the output and the written states. ``tensors``: the states read, then the adapter."""
        ctx.visits, ctx.call = visits, call
        ctx.save_for_backward(hidden, *tensors)
        states = dict(zip(call.reads, tensors, strict=False))
        output, written = visits.forward(call, hidden, states, tensors[len(call.reads) :])
        return (output, *written)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the inputs that need one."""
        call: VisitCall = ctx.call
        hidden, *tensors = ctx.saved_tensors
        states = dict(zip(call.reads, tensors, strict=False))
        adapter = tensors[len(call.reads) :]
        needs = ctx.needs_input_grad[3:]
        wanted = [name for name, needed in zip(call.reads, needs, strict=False) if needed]
        grad_hidden, grad_states, grad_adapter = ctx.visits.backward(
            call, hidden, states, adapter, grads[0], grads[1:], wanted
        )
        found = [grad_states.get(name) for name in call.reads] + list(grad_adapter)
        kept = [grad if needed else None for grad, needed in zip(found, needs, strict=True)]
        return None, None, grad_hidden if ctx.needs_input_grad[2] else None, *kept


class ChunkedLoss(torch.autograd.Function):
    """The engine's loss: its gradient is made together with it, and no (B, T, V) logits ever exist."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: LossHead, targets: Targets, denominator: int
    ) -> torch.Tensor:
        """Return the summed cross-entropy of (B, T, D) block outputs over the denominator, a float32 scalar."""
        if not ctx.needs_input_grad[0]:
            return head.loss_sum(hidden, targets) / denominator
        loss, gradient = head.loss_and_gradient(hidden, targets, denominator)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the kept gradient, scaled; a factor of one changes no bit."""
        (gradient,) = ctx.saved_tensors
        return (gradient.float() * grads[0]).to(gradient.dtype), None, None, None
