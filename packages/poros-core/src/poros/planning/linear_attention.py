"""What linear attention (the gated delta rule of Qwen3.5) costs where Transformers' torch implementation computes it.

It works in chunks of tokens: products inside a chunk, then a state of (K, V) per head that is carried from chunk to
chunk. An installed kernel (flash-linear-attention) keeps next to nothing of this in between.

Shape letters: N value heads, K and V sizes of a key and a value head, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from poros.kernels import TORCH

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["LinearAttention", "linear_attention"]

CHUNK = 64
# Bytes that autograd keeps per position and head: for each element of a key, of a value, of a row of a chunk's matrix,
# and of the carried state. Fitted to what `saved_tensors_hooks` saw of torch_chunk_gated_delta_rule at 36 shapes under
# autocast (largest error 0.7 %; 2026-11-30, CPU, torch 2.15, Transformers 5.24).
KEY_BYTES, VALUE_BYTES, CHUNK_BYTES, STATE_BYTES = 36, 12, 14.5, 8
# How often they cross device memory: written by forward and by the recompute, read by the backward, and as much again
# for gradients. ASSUMED, to be replaced by measurement.
FORWARD_PASSES, BACKWARD_PASSES = 1, 4
# Kernels of one micro-batch, counted in the code: around the loop, and per chunk.
FORWARD_KERNELS, FORWARD_KERNELS_PER_CHUNK = 60, 16
BACKWARD_KERNELS, BACKWARD_KERNELS_PER_CHUNK = 200, 64


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearAttention:
    """The sizes of a block's delta rule.

    Attributes:
        heads, key, value: N, K and V.
        in_torch: whether Transformers' torch implementation runs.
    """

    heads: int
    key: int
    value: int
    in_torch: bool

    @property
    def bytes_per_position(self) -> int:
        """Bytes that a recompute keeps per position for its backward."""
        if not self.in_torch:
            return 0
        per_head = (
            KEY_BYTES * self.key
            + VALUE_BYTES * self.value
            + CHUNK_BYTES * CHUNK
            + STATE_BYTES * self.key * self.value / CHUNK
        )
        return round(self.heads * per_head)

    def kernels(self, tokens: int) -> tuple[int, int]:
        """Return how many kernels a forward and a backward visit of one micro-batch launch besides linear layers'."""
        if not self.in_torch:
            return 0, 0
        chunks = -(-tokens // CHUNK)
        return (
            FORWARD_KERNELS + FORWARD_KERNELS_PER_CHUNK * chunks,
            BACKWARD_KERNELS + BACKWARD_KERNELS_PER_CHUNK * chunks,
        )

    def padded(self, tokens: int) -> int:
        """Return ``tokens`` rounded up to whole chunks."""
        return -(-tokens // CHUNK) * CHUNK


def linear_attention(
    config: PreTrainedConfig, layer_type: str, kernels: Mapping[str, str]
) -> LinearAttention | None:
    """Return the sizes for a block of ``layer_type``, None if it has no linear attention.

    Args:
        config: of the text model.
        kernels: see `Architecture.kernels`.
    """
    if layer_type != "linear_attention":
        return None
    return LinearAttention(
        heads=int(config.linear_num_value_heads),
        key=int(config.linear_key_head_dim),
        value=int(config.linear_value_head_dim),
        in_torch=kernels.get("chunk_gated_delta_rule", TORCH) == TORCH,
    )
