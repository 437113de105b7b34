"""Merged weights, one tensor at a time.

Shape letters: O out features, I in features, R rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from poros.adapters import base_linears
from poros.blocks.fill import load_checked
from poros.blocks.frozen_linear import FrozenLinear
from poros.export.fitting import AdaptedModel, LoraPair
from poros.interfaces import TensorSource

__all__ = ["MERGED_DTYPE", "MergedWeights", "RoundedSource", "merge_pair"]

MERGED_DTYPE = torch.bfloat16


def merge_pair(weight: torch.Tensor, pair: LoraPair) -> torch.Tensor:
    """Return float32 ``weight + scaling * (B @ A)`` for an (O, I) weight, on its device.

    Numerics:
        The operations of PEFT's `merge_and_unload` on a float32 model, so that the results are equal bit for bit on
        the CPU. On a bfloat16 model PEFT rounds the delta and then the sum; here only the sum is rounded, by whoever
        stores it.

    Memory:
        Two float32 matrices of the weight's shape.
    """
    a, b = (side.to(weight.device).float() for side in (pair.a, pair.b))
    return (b @ a).mul_(pair.scaling).add_(weight.float())


class RoundedSource:
    """A `TensorSource` whose tensors are rounded to the merged dtype as they are read."""

    def __init__(self, source: TensorSource) -> None:
        self.fingerprint = source.fingerprint
        self._source = source

    def names(self) -> Sequence[str]:
        """See `TensorSource.names`."""
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource.shape`."""
        return self._source.shape(name)

    def load(self, name: str, device: torch.device) -> torch.Tensor:
        """See `TensorSource.load`."""
        return self._source.load(name, device).to(MERGED_DTYPE)


class MergedWeights:
    """The tensors of the merged text model, by parameter name, in bfloat16 on the CPU.

    Args:
        adapted: base and adapter.
        dequantized: merge onto what the weight format makes of the base (quantized, dequantized to the run's compute
            dtype), instead of the checkpoint's own values.
        device: where weights are quantized and products computed.

    Attributes:
        names: every parameter, block by block between the vocabulary matrices.
        casts: per stored dtype other than bfloat16, how many tensors were rounded so far.
    """

    def __init__(self, adapted: AdaptedModel, *, dequantized: bool, device: torch.device) -> None:
        model = adapted.model
        self._model = model
        self._device = device
        self._dequantized = dequantized
        self.names: Sequence[str] = model.meta.tensor_names
        self.casts: Counter[str] = Counter()
        blocks = model.meta.parts.blocks
        self._pairs: Mapping[str, LoraPair] = {
            f"{blocks}.{block}.{path}.weight": pair for (block, path), pair in adapted.pairs.items()
        }
        self._linears: Mapping[str, FrozenLinear] = {
            f"{blocks}.{index}.{path}.weight": linear
            for index, block in enumerate(model.meta.blocks)
            for path, linear in base_linears(block)
        }

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._model.source.shape(name)

    @torch.no_grad()
    def load(self, name: str) -> torch.Tensor:
        """Read, merge and round one tensor.

        Raises:
            CheckpointError: the file changed, or it holds NaN or infinity.
            FormatError: with ``dequantized``, the weight cannot be stored in the run's format.
        """
        weight = load_checked(self._model.source, name, self.shape(name), self._device)
        if weight.dtype != MERGED_DTYPE:
            self.casts[str(weight.dtype)] += 1
        if self._dequantized and name in self._linears:
            weight = self._round_trip(weight, self._linears[name])
        if (pair := self._pairs.get(name)) is not None:
            weight = merge_pair(weight, pair)
        return weight.to(MERGED_DTYPE).cpu()

    def _round_trip(self, weight: torch.Tensor, shape: FrozenLinear) -> torch.Tensor:
        """Return what a forward pass of the run multiplied with instead of this weight."""
        weight_format, compute_dtype = self._model.weight_format, self._model.numerics.compute_dtype
        linear = weight_format.linear(
            shape.in_features, shape.out_features, bias=False, compute_dtype=compute_dtype
        )
        stored = weight_format.encode(weight)
        specs = weight_format.specs(shape.out_features, shape.in_features)
        linear.bind({spec.name: stored[spec.name].view(spec.shape) for spec in specs})
        return linear.dequantize()
