"""A frozen linear layer and its LoRA branch as one product: what PEFT's layer computes, without passes in between.

PEFT adds the scaled branch to the output in kernels of their own, three more passes over the largest tensors of a
block, and autograd adds the two gradients of the input in another. Here both sums happen inside the matrix products
that make their last term, accumulated in float32 and rounded once.

Shape letters: N rows, I in features, O out features, R rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import Linear
from torch.autograd.function import FunctionCtx

from poros.blocks.frozen_linear import FrozenLinear, unread_product

__all__ = ["FrozenLoraLinear"]


class FrozenLoraLinear(Linear):
    """PEFT's LoRA layer for a `FrozenLinear`, through PEFT's dispatch of custom modules."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return (..., O) outputs of (..., I) inputs in the layer's compute dtype.

        Over any other base layer, that of a compiled block, these are operations that a compiler sees through.
        """
        base = self.base_layer
        if self.disable_adapters:
            output: torch.Tensor = base(x)
            return output
        (adapter,) = self.active_adapters
        if not isinstance(base, FrozenLinear):
            # PEFT scales (N, O) outputs, and their gradients in passes of their own; the (N, R) ones cost nothing.
            low = self.lora_A[adapter](self.lora_dropout[adapter](x)) * self.scaling[adapter]
            return base(x).add(self.lora_B[adapter](low))
        dtype = base.compute_dtype
        rows = x.to(dtype).reshape(-1, base.in_features)
        dropout = self.lora_dropout[adapter]
        drops = self.training and isinstance(dropout, torch.nn.Dropout)
        product: torch.Tensor = _FrozenLoraProduct.apply(
            rows,
            dropout(rows) if drops else None,
            self.lora_A[adapter].weight.to(dtype),
            self.lora_B[adapter].weight.to(dtype),
            base,
            self.scaling[adapter],
        )
        return product.view(*x.shape[:-1], base.out_features)


class _FrozenLoraProduct(torch.autograd.Function):
    """Keeps the layer, not its bytes, on the tape: backward dequantizes what the slot holds in the same visit."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        rows: torch.Tensor,
        dropped: torch.Tensor | None,
        lora_a: torch.Tensor,
        lora_b: torch.Tensor,
        layer: FrozenLinear,
        scaling: float,
    ) -> torch.Tensor:
        branch = rows if dropped is None else dropped
        low = F.linear(branch, lora_a)
        if layer.reads_product:
            output = F.linear(rows, layer.matrix(), layer.bias_in_compute_dtype())
            output.addmm_(low, lora_b.t(), alpha=scaling)
        else:
            output = unread_product(rows, layer.out_features)
        ctx.save_for_backward(branch, lora_a, lora_b, low)
        ctx.layer, ctx.scaling, ctx.has_dropout = layer, scaling, dropped is not None  # type: ignore[attr-defined]
        return output

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        branch, lora_a, lora_b, low = ctx.saved_tensors  # type: ignore[attr-defined]
        scaling: float = ctx.scaling  # type: ignore[attr-defined]
        needs_rows, needs_dropped, *_ = ctx.needs_input_grad  # type: ignore[attr-defined]
        (grad,) = grads
        grad_low = torch.mm(grad, lora_b).mul_(scaling)
        grad_a = torch.mm(grad_low.t(), branch)
        grad_b = torch.mm(grad.t(), low).mul_(scaling)
        grad_rows = torch.mm(grad, ctx.layer.matrix()) if needs_rows else None  # type: ignore[attr-defined]
        if ctx.has_dropout:  # type: ignore[attr-defined]
            grad_dropped = torch.mm(grad_low, lora_a) if needs_dropped else None
            return grad_rows, grad_dropped, grad_a, grad_b, None, None
        if grad_rows is not None:
            grad_rows.addmm_(grad_low, lora_a)
        return grad_rows, None, grad_a, grad_b, None, None
