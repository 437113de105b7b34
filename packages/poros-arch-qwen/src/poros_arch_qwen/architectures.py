"""Qwen2.5, Qwen3 and Qwen3.5 dense models. What differs in their layers lives in Transformers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from poros.decoder import DecoderArchitecture, Tables, refuse_feature
from poros.kernels import active_kernel, torch_kernels

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["Qwen2", "Qwen3", "Qwen3_5"]

# What flash-linear-attention and causal-conv1d replace where they are installed, by Transformers' name of it.
REPLACEABLE = {"chunk_gated_delta_rule": "torch_chunk_gated_delta_rule", "causal_conv1d": "causal_conv1d_fn"}


class Qwen2(DecoderArchitecture):
    """Qwen2 and Qwen2.5: biases on q, k and v."""

    name: ClassVar[str] = "qwen2"
    model_types: ClassVar[tuple[str, ...]] = ("qwen2",)
    packs_rows: ClassVar[bool] = True


class Qwen3(DecoderArchitecture):
    """Qwen3: no biases, RMS norms on queries and keys, an explicit head size."""

    name: ClassVar[str] = "qwen3"
    model_types: ClassVar[tuple[str, ...]] = ("qwen3",)
    packs_rows: ClassVar[bool] = True


class Qwen3_5(DecoderArchitecture):  # noqa: N801 - the version's dot
    """Qwen3.5 and Qwen3.6, of a wrapper the text tower: gated delta rule in most blocks, gated attention in the others.

    The two kinds share no projection, so that targets of the one leave the other without an adapter.
    """

    name: ClassVar[str] = "qwen3_5"
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_text", "qwen3_5")
    layer_types: ClassVar[tuple[str, ...]] = ("linear_attention", "full_attention")
    default_targets: ClassVar[tuple[str, ...]] = (
        *DecoderArchitecture.default_targets,
        "in_proj_qkv",
        "in_proj_z",
        "in_proj_b",
        "in_proj_a",
        "out_proj",
    )
    # The recurrent state and the convolution of its linear attention run on from one sample of a row into the next.
    packs_rows: ClassVar[bool] = False
    # The vision tower and the head that predicts several tokens at once.
    ignored_tensors: ClassVar[tuple[str, ...]] = (
        *DecoderArchitecture.ignored_tensors,
        r"(model\.)?visual\..*",
        r"mtp\..*",
    )

    def check_config(self, config: PreTrainedConfig) -> None:
        """Refuse linear attention whose heads do not share evenly; see `Architecture.check_config`."""
        super().check_config(config)
        text: Any = self.text_config(config)
        keys, values = text.linear_num_key_heads, text.linear_num_value_heads
        if keys <= 0 or values % keys:
            raise refuse_feature(
                config,
                expected=f"a divisor of `linear_num_value_heads` ({values})",
                got=keys,
                where="linear_num_key_heads",
                next_step="Download config.json again",
            )

    def rotary_tables(
        self, rotary: nn.Module, hidden: torch.Tensor, position_ids: torch.Tensor, types: Collection[str]
    ) -> Tables:
        """Return the one table; text stands at the same place in time, height and width."""
        return dict.fromkeys(types, rotary(hidden, position_ids.expand(3, 1, -1)))

    def kernels(self) -> Mapping[str, str]:
        """Return what computes the linear attention's two parts; see `Architecture.kernels`."""
        from transformers.models.qwen3_5 import modeling_qwen3_5

        return {
            name: active_kernel(getattr(modeling_qwen3_5, function)) for name, function in REPLACEABLE.items()
        }

    def torch_kernels(self) -> AbstractContextManager[None]:
        """See `Architecture.torch_kernels`."""
        from transformers.models.qwen3_5 import modeling_qwen3_5

        return torch_kernels(modeling_qwen3_5, REPLACEABLE.values())
