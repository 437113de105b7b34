"""Gemma 3 dense models, whose differences live in Transformers' layers; Gemma 4 has a module of its own."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from poros.decoder import DecoderArchitecture, Tables, refuse_feature
from poros_arch_gemma.gemma4 import Gemma4

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["Gemma3", "Gemma4"]


class Gemma3(DecoderArchitecture):
    """Gemma 3, of a wrapper the text tower: two rotary bases, sliding windows, scaled embedding, tied head."""

    name: ClassVar[str] = "gemma3"
    model_types: ClassVar[tuple[str, ...]] = ("gemma3_text", "gemma3")
    packs_rows: ClassVar[bool] = True
    # The vision tower and what joins it to the text model.
    ignored_tensors: ClassVar[tuple[str, ...]] = (
        *DecoderArchitecture.ignored_tensors,
        r"(model\.)?vision_tower\..*",
        r"(model\.)?multi_modal_projector\..*",
    )

    def check_config(self, config: PreTrainedConfig) -> None:
        """Refuse soft-capped attention besides what the base refuses; see `Architecture.check_config`."""
        super().check_config(config)
        if softcap := getattr(self.text_config(config), "attn_logit_softcapping", None):
            raise refuse_feature(
                config,
                expected="attention scores without soft-capping, which no Gemma 3 has and Transformers leaves out",
                got=softcap,
                where="attn_logit_softcapping",
                next_step="Use a Gemma 3 model as its authors published it",
            )

    def rotary_tables(
        self, rotary: nn.Module, hidden: torch.Tensor, position_ids: torch.Tensor, types: Collection[str]
    ) -> Tables:
        """Return a table per layer type: sliding and full layers have bases of their own."""
        return {layer_type: rotary(hidden, position_ids, layer_type) for layer_type in types}

    def embedding_scale(self, config: PreTrainedConfig, dtype: torch.dtype) -> torch.Tensor:
        """Return the square root of the hidden size; see `Architecture.embedding_scale`."""
        return torch.tensor(config.hidden_size**0.5).to(dtype)

    def logit_softcap(self, config: PreTrainedConfig) -> float | None:
        """Return the config's value; see `Architecture.logit_softcap`."""
        return config.final_logit_softcapping
