"""The one product path of frozen linear layers: dequantize, then ``linear``, in forward, recompute and backward.

Shape letters: O out features, I in features.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import FunctionCtx

__all__ = ["FrozenLinear", "reading_products", "unread_product"]


class FrozenLinear(nn.Linear, ABC):
    """A linear layer whose frozen weight lives in a buffer that somebody else owns.

    Subclassing `nn.Linear` lets PEFT's stock dispatch wrap it. The ``weight`` parameter stays on the meta device: it
    only states the shape. The bytes are bound by `bind` as views of a device slot or a resident buffer.

    Attributes:
        compute_dtype: dtype of the product.
        has_bias: the layer adds a bound bias; ``bias`` itself stays None so that nothing can rebind it.
        bias_view: the bound bias in the storage dtype, or None.
        reads_product: somebody reads the product's values; otherwise it is not computed, and is NaN. Its gradients
            need none of them.
        workspace: (O, I) buffer that `materialize` fills once per visit, or None to dequantize at every use.
        scratch: (O, I) buffer that every use without a workspace dequantizes into, shared with other layers: its
            content lasts until the next of them is used. None allocates a matrix at every use.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, compute_dtype: torch.dtype
    ) -> None:
        super().__init__(in_features, out_features, bias=False, device="meta", dtype=compute_dtype)
        self.weight.requires_grad_(False)
        self.compute_dtype = compute_dtype
        self.has_bias = bias
        self.workspace: torch.Tensor | None = None
        self.scratch: torch.Tensor | None = None
        self.bias_view: torch.Tensor | None = None
        self.reads_product = True

    def bind(self, views: Mapping[str, torch.Tensor]) -> None:
        """Point at the bytes of this layer.

        Args:
            views: the tensors of `WeightFormat.specs`, without the layer's prefix, and ``bias`` where there is one.
        """
        self.bias_view = views["bias"] if self.has_bias else None
        self.bind_weight(views)

    def bound_tensors(self) -> list[torch.Tensor]:
        """Return every frozen tensor that the product reads right now, for the check that none left its buffer."""
        bias = [] if self.bias_view is None else [self.bias_view]
        return [*self.stored_tensors(), *bias]

    @abstractmethod
    def stored_tensors(self) -> list[torch.Tensor]:
        """Return the weight's stored tensors as they are bound right now."""

    @abstractmethod
    def bind_weight(self, views: Mapping[str, torch.Tensor]) -> None:
        """Point at the stored tensors of the weight."""

    @abstractmethod
    def dequantize(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the (O, I) weight in ``compute_dtype`` on the current stream, written to ``out`` if given."""

    @property
    def needs_dequantize(self) -> bool:
        """Whether the product needs a matrix that the stored bytes do not already hold."""
        return True

    def materialize(self) -> None:
        """Fill the workspace, so that every product of this visit reads it."""
        if self.workspace is not None:
            self.dequantize(out=self.workspace)

    def matrix(self) -> torch.Tensor:
        """Return the (O, I) weight for the product that is issued next: the workspace, or dequantized for this use."""
        return self.workspace if self.workspace is not None else self.dequantize(out=self.scratch)

    def bias_in_compute_dtype(self) -> torch.Tensor | None:
        """Return the bias cast to ``compute_dtype``, or None."""
        return None if self.bias_view is None else self.bias_view.to(self.compute_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T + bias`` for x of shape (..., I), in ``compute_dtype``."""
        product: torch.Tensor = _FrozenProduct.apply(x.to(self.compute_dtype), self)
        return product


@contextlib.contextmanager
def reading_products(layers: Sequence[Any], reads: bool) -> Iterator[None]:
    """Set ``reads_product`` of the layers for as long as the context lasts."""
    for layer in layers:
        layer.reads_product = reads
    try:
        yield
    finally:
        for layer in layers:
            layer.reads_product = True


def unread_product(x: torch.Tensor, out_features: int) -> torch.Tensor:
    """Return what stands for a product of (..., I) inputs that nobody reads: NaN, so that whoever does shows it."""
    return x.new_full((*x.shape[:-1], out_features), torch.nan)


class _FrozenProduct(torch.autograd.Function):
    """Keeps the layer, not its bytes, on the tape: backward dequantizes what the slot holds in the same visit."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, layer: FrozenLinear) -> torch.Tensor:
        ctx.layer = layer  # type: ignore[attr-defined]
        if not layer.reads_product:
            return unread_product(x, layer.out_features)
        return F.linear(x, layer.matrix(), layer.bias_in_compute_dtype())

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        layer: FrozenLinear = ctx.layer  # type: ignore[attr-defined]
        return grads[0] @ layer.matrix(), None
