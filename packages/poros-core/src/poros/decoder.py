"""A base for plain decoder-only families whose layers Transformers calls the way Llama and Qwen2 do."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from poros.errors import ArchitectureError, explain
from poros.interfaces import Architecture, BlockContext, ModelParts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["DecoderArchitecture", "causal_masks"]

# Rotary types whose tables do not depend on the length of the sequence at hand.
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class DecoderArchitecture(Architecture):
    """One rotary table, masks per layer type, blocks at ``model.layers``: a family on this base is about 20 lines.

    A subclass states ``name``, ``model_types`` and ``default_targets``.
    """

    default_targets: ClassVar[tuple[str, ...]] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    # A derived table that old checkpoints carry; Transformers recomputes it.
    ignored_tensors: ClassVar[tuple[str, ...]] = (r".*rotary_emb\.inv_freq$",)

    def check_config(self, config: PreTrainedConfig) -> None:
        """Refuse rotary embeddings that depend on the sequence's length; see `Architecture.check_config`."""
        rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope_type not in SUPPORTED_ROPE_TYPES:
            raise ArchitectureError(
                explain(
                    f"Unsupported feature inside `{config.model_type}`",
                    expected=f"a rotary type among {list(SUPPORTED_ROPE_TYPES)}",
                    got=f"`{rope_type}`",
                    where="config.json, rope_parameters.rope_type",
                    next_step="Remove the rope scaling from config.json if the run's lengths do not need it",
                )
            )

    def build(self, config: PreTrainedConfig) -> nn.Module:
        """Build the causal language model on the meta device with SDPA attention."""
        from transformers import AutoModelForCausalLM

        config = copy.deepcopy(config)
        config.use_cache = False
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        return model

    def parts(self, config: PreTrainedConfig) -> ModelParts:
        """Return the paths that every plain ``*ForCausalLM`` class shares."""
        return ModelParts(
            blocks="model.layers",
            embedding="model.embed_tokens",
            final_norm="model.norm",
            head="lm_head",
            tied=bool(config.tie_word_embeddings),
        )

    def layer_type(self, config: PreTrainedConfig, block_index: int) -> str:
        """Return the config's layer type, ``full_attention`` where it states none."""
        layer_types = getattr(config, "layer_types", None)
        return layer_types[block_index] if layer_types else "full_attention"

    def context(
        self, model: nn.Module, *, batch: int, tokens: int, device: torch.device, dtype: torch.dtype
    ) -> BlockContext:
        """Build tables with Transformers' own rotary module and mask functions; see `Architecture.context`."""
        config: PreTrainedConfig = model.config
        position_ids = torch.arange(tokens, device=device)[None]
        # The inverse frequencies are computed on the CPU, as they are when Transformers loads a model: another
        # device's pow rounds differently.
        with torch.device("cpu"):
            rotary = type(model.get_submodule("model.rotary_emb"))(config=config).to(device)
        hidden = torch.empty(batch, tokens, config.hidden_size, device=device, dtype=dtype)
        with torch.no_grad():
            tables = rotary(hidden, position_ids)
        types = sorted({self.layer_type(config, index) for index in range(config.num_hidden_layers)})
        return BlockContext(
            position_ids=position_ids,
            position_embeddings=dict.fromkeys(types, tables),
            attention_masks=causal_masks(config, types, hidden, position_ids),
        )

    def call_block(
        self, block: nn.Module, hidden: torch.Tensor, context: BlockContext, layer_type: str
    ) -> torch.Tensor:
        """Call one decoder layer; no cache argument is passed, because its name differs between versions."""
        output: torch.Tensor = block(
            hidden,
            attention_mask=context.attention_masks[layer_type],
            position_ids=context.position_ids,
            position_embeddings=context.position_embeddings[layer_type],
        )
        return output


def causal_masks(
    config: PreTrainedConfig, layer_types: Sequence[str], hidden: torch.Tensor, position_ids: torch.Tensor
) -> dict[str, torch.Tensor | None]:
    """Return Transformers' own mask of every layer type, None where SDPA's causal path needs none.

    Args:
        config: of the text model.
        layer_types: ``full_attention``, ``sliding_attention``.
        hidden: (B, T, D), only its shape, dtype and device matter.
        position_ids: (1, T).
    """
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    makers = {
        "full_attention": create_causal_mask,
        "sliding_attention": create_sliding_window_causal_mask,
    }
    return {
        layer_type: makers[layer_type](
            config=config,
            inputs_embeds=hidden,
            attention_mask=None,
            position_ids=position_ids,
            **{_cache_keyword(makers[layer_type]): None},
        )
        for layer_type in layer_types
    }


def _cache_keyword(make_mask: object) -> str:
    """Transformers renamed the mask functions' ``past_key_values`` to ``cache``."""
    return "cache" if "cache" in inspect.signature(make_mask).parameters else "past_key_values"  # type: ignore[arg-type]
