"""Filling a block's buffer from a checkpoint, one tensor at a time."""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import nn

from poros.adapters import base_linears
from poros.blocks.kinds import plain_tensors
from poros.blocks.layout import BlockLayout
from poros.errors import CheckpointError, explain
from poros.interfaces import TensorSource, WeightFormat

__all__ = ["BlockFiller", "check_shape", "load_checked"]


def check_shape(source: TensorSource, name: str, shape: tuple[int, ...]) -> None:
    """Raise `CheckpointError` unless the tensor has the shape that the config implies."""
    found = source.shape(name)
    if found != shape:
        raise CheckpointError(
            explain(
                "The checkpoint does not fit its config.json",
                expected=f"shape {list(shape)}",
                got=list(found),
                where=f"tensor `{name}`",
                next_step="Use the config.json that belongs to these weights",
            )
        )


def load_checked(
    source: TensorSource, name: str, shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """Read one tensor in its stored dtype.

    Raises:
        CheckpointError: the tensor is absent, its shape is not what the config implies, or it holds NaN or infinity.
    """
    check_shape(source, name, shape)
    tensor = source.load(name, device)
    # The extremes carry NaN and infinity through without a temporary of the tensor's size.
    if not all(math.isfinite(extreme) for extreme in tensor.aminmax()):
        raise CheckpointError(
            explain(
                "The checkpoint holds NaN or infinity",
                expected="finite values",
                got="at least one that is not",
                where=f"tensor `{name}`",
                next_step="Get these weights again: every loss would be NaN",
            )
        )
    return tensor


class BlockFiller:
    """Quantizes weights on ``device`` and writes them where a block lives.

    Attributes:
        casts: how many tensors of each stored dtype were cast to the storage dtype, to be told to the user.
    """

    def __init__(
        self,
        source: TensorSource,
        weight_format: WeightFormat,
        storage_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._source = source
        self._format = weight_format
        self._storage_dtype = storage_dtype
        self._device = device
        self.casts: Counter[str] = Counter()

    def fill(self, block: nn.Module, prefix: str, layout: BlockLayout, target: torch.Tensor) -> None:
        """Write every tensor of a meta block into ``target``, a uint8 vector in host or device memory.

        Args:
            block: the injected meta block, which knows names and shapes.
            prefix: what precedes the names in the checkpoint, ``model.layers.7.``.
            layout: where each tensor goes.
            target: the block's bytes.

        Raises:
            CheckpointError: a tensor is absent, misshapen or not finite.
            FormatError: a weight cannot be stored in the format.

        Memory:
            One weight in its stored dtype and its encoding, on the device that quantizes.
        """
        views = layout.views(target)
        for path, linear in base_linears(block):
            shape = (linear.out_features, linear.in_features)
            weight = load_checked(self._source, f"{prefix}{path}.weight", shape, self._device)
            for suffix, tensor in self._format.encode(weight).items():
                view = views[f"{path}.{suffix}"]
                view.copy_(tensor.view(view.shape))
            if linear.has_bias:
                views[f"{path}.bias"].copy_(self._plain(f"{prefix}{path}.bias", (linear.out_features,)))
        for name, tensor in plain_tensors(block):
            views[name].copy_(self._plain(prefix + name, tuple(tensor.shape)))

    def _plain(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = load_checked(self._source, name, shape, self._device)
        if tensor.dtype != self._storage_dtype:
            self.casts[f"{tensor.dtype} -> {self._storage_dtype}"] += 1
        return tensor.to(self._storage_dtype)
