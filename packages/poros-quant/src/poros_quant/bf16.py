"""bf16_bitwise: the checkpoint's own bfloat16 bytes, streamed as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from poros.blocks.frozen_linear import FrozenLinear
from poros.errors import FormatError, explain
from poros.interfaces import TensorSpec, WeightFormat

__all__ = ["Bf16Bitwise"]


class Bf16Linear(FrozenLinear):
    """A linear layer over bfloat16 bytes; in bfloat16 compute the stored bytes are the matrix."""

    def bind_weight(self, views: Mapping[str, torch.Tensor]) -> None:
        """Keep the stored weight."""
        self._stored = views["weight"]

    def stored_tensors(self) -> list[torch.Tensor]:
        """See `FrozenLinear.stored_tensors`."""
        return [self._stored]

    def dequantize(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the stored weight itself, or its exact float32 widening."""
        if out is not None:
            return out.copy_(self._stored)
        return self._stored.to(self.compute_dtype)

    @property
    def needs_dequantize(self) -> bool:
        """Only where products do not run in bfloat16."""
        return self.compute_dtype != torch.bfloat16


class Bf16Bitwise(WeightFormat):
    """No quantization: two bytes a weight, equal to the file byte for byte."""

    name: ClassVar[str] = "bf16_bitwise"
    claims_bitwise: ClassVar[bool] = True
    experimental: ClassVar[bool] = True

    def specs(self, out_features: int, in_features: int) -> tuple[TensorSpec, ...]:
        """Return the one tensor; see `WeightFormat.specs`."""
        return (TensorSpec(name="weight", dtype=torch.bfloat16, shape=(out_features, in_features)),)

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the weight as it is.

        Raises:
            FormatError: the weight is not bfloat16, so that storing it would round it.
        """
        if weight.dtype != torch.bfloat16:
            raise FormatError(
                explain(
                    "Cannot store a weight as `bf16_bitwise`",
                    expected="torch.bfloat16 in the checkpoint",
                    got=weight.dtype,
                    next_step="Convert the checkpoint to bfloat16 yourself, or use `quantization: nf4`",
                )
            )
        return {"weight": weight}

    def linear(
        self, in_features: int, out_features: int, *, bias: bool, compute_dtype: torch.dtype
    ) -> FrozenLinear:
        """Return an unbound bfloat16 linear layer."""
        return Bf16Linear(in_features, out_features, bias=bias, compute_dtype=compute_dtype)
