"""Gemma 4 dense models: per-layer-type attention shapes, keys and values shared across blocks, per-layer inputs.

Shape letters: B batch, T tokens, D hidden size, K key/value heads, H head dim, L blocks, P size of a per-layer input.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from poros.decoder import DecoderArchitecture, Tables, refuse_feature
from poros.interfaces import BlockContext, BlockStates, PerBlockInputs, StateSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["Gemma4"]

PER_LAYER_INPUT = "per_layer_input"

# The first version whose layers take shared keys and values as an argument and that Poros runs on.
SHARING_SINCE = "5.17"


class Gemma4(DecoderArchitecture):
    """Gemma 4 dense: 31B-like, and E2B/E4B with shared keys and values and per-layer inputs.

    A block that computes its own keys and values may be the last of its layer type to do so: later blocks of that type
    read what it computed. Which block is which is read off the built module, whose attributes are the same in every
    supported Transformers version.

    Per-layer gates and projections are not adapted by default: they are small next to the attention and the MLP, which
    every block has. `lora.targets` may name them.
    """

    name: ClassVar[str] = "gemma4"
    model_types: ClassVar[tuple[str, ...]] = ("gemma4_text", "gemma4")
    packs_rows: ClassVar[bool] = True
    rope_types: ClassVar[tuple[str, ...]] = ("default", "linear", "proportional")
    # The towers and what joins them to the text model.
    ignored_tensors: ClassVar[tuple[str, ...]] = (
        *DecoderArchitecture.ignored_tensors,
        r"(model\.)?(vision|audio)_tower\..*",
        r"(model\.)?embed_(vision|audio)\..*",
    )

    def ignored(self, config: PreTrainedConfig) -> tuple[str, ...]:
        """Add the keys, values and norms that files repeat for blocks which read another block's; of those alone."""
        text = self.text_config(config)
        count = text.num_hidden_layers
        blocks = "|".join(str(index) for index in range(count - text.num_kv_shared_layers, count))
        if not blocks:
            return self.ignored_tensors
        leaves = r"self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*"
        return (
            *self.ignored_tensors,
            rf"(model\.)?(language_model\.)?(model\.)?layers\.({blocks})\.{leaves}",
        )

    def check_config(self, config: PreTrainedConfig) -> None:
        """Refuse experts and sharing that cannot be run, besides what the base refuses."""
        super().check_config(config)
        text = self.text_config(config)
        if text.enable_moe_block:
            raise refuse_feature(
                config,
                expected="a dense model",
                got="mixture of experts",
                where="enable_moe_block",
                next_step="Use Gemma 4 31B, E4B or E2B: experts are 3-D parameters, neither quantized nor adapted as "
                "linear layers",
            )
        if text.num_kv_shared_layers < 0:
            raise refuse_feature(
                config,
                expected="0 or more blocks that read another block's keys and values",
                got=text.num_kv_shared_layers,
                where="num_kv_shared_layers",
                next_step="Download config.json again",
            )
        if text.num_kv_shared_layers:
            self._check_sharing(config, text)

    def _check_sharing(self, config: PreTrainedConfig, text: PreTrainedConfig) -> None:
        first = max(text.num_hidden_layers - text.num_kv_shared_layers, 0)
        if missing := sorted(set(text.layer_types[first:]) - set(text.layer_types[:first])):
            raise refuse_feature(
                config,
                expected="a block of every layer type that computes its own keys and values",
                got=f"none of {missing} among the first {first}",
                where="num_kv_shared_layers",
                next_step="Use a model as its authors published it; draft models that read another model's keys and "
                "values cannot be trained alone",
            )
        import transformers
        from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer

        if "shared_kv_states" not in inspect.signature(Gemma4TextDecoderLayer.forward).parameters:
            raise refuse_feature(
                config,
                expected=f"Transformers {SHARING_SINCE} or newer, whose layers share keys and values without a cache",
                got=f"Transformers {transformers.__version__}",
                where="num_kv_shared_layers",
                next_step=f"Run `uv add 'transformers>={SHARING_SINCE}'`: this one keeps them in the cache, which "
                "training switches off",
            )

    def build(self, config: PreTrainedConfig) -> nn.Module:
        """Build the model; see `Architecture.build`. Keys and values that no block reads are not handed on."""
        model = super().build(config)
        blocks: Any = model.get_submodule(self.parts(config).blocks)
        attentions = [block.self_attn for block in blocks]
        read = {attention.layer_type for attention in attentions if attention.is_kv_shared_layer}
        for attention in attentions:
            # Transformers marks the last block of every type, readers or not; the mark would make a kind of its own.
            attention.store_full_length_kv &= attention.layer_type in read
        return model

    def rotary_tables(
        self, rotary: nn.Module, hidden: torch.Tensor, position_ids: torch.Tensor, types: Collection[str]
    ) -> Tables:
        """Return a table per layer type: sliding and full layers have bases and head sizes of their own."""
        return {layer_type: rotary(hidden, position_ids, layer_type) for layer_type in types}

    def block_states(self, block: nn.Module) -> BlockStates:
        """Return the keys and values that a block hands on or reads, as (B, T, K, H)."""
        attention: Any = block.self_attn
        heads = attention.config.num_attention_heads // attention.num_key_value_groups
        specs = tuple(
            StateSpec(name=name, sizes=(heads, attention.head_dim)) for name in _names(attention.layer_type)
        )
        return BlockStates(
            reads=specs if attention.is_kv_shared_layer else (),
            writes=specs if attention.store_full_length_kv else (),
        )

    def per_block_inputs(self, model: nn.Module) -> PerBlockInputs | None:
        """Return the per-layer embedding, which E2B and E4B have."""
        config: Any = model.config
        size = config.hidden_size_per_layer_input
        if not size:
            return None
        return PerBlockInputs(
            spec=StateSpec(name=PER_LAYER_INPUT, sizes=(size,)),
            table="model.embed_tokens_per_layer",
            scale=size**0.5,
            modules=("model.per_layer_model_projection", "model.per_layer_projection_norm"),
        )

    def mix_per_block_inputs(
        self, model: nn.Module, modules: Mapping[str, nn.Module], hidden: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Return (B, T, L, P) inputs, by Transformers' own method over the given modules."""
        text: Any = copy.copy(model.get_submodule("model"))
        text._modules = {**text._modules, **{path.rpartition(".")[2]: m for path, m in modules.items()}}
        shape = (text.config.num_hidden_layers, text.config.hidden_size_per_layer_input)
        mixed: torch.Tensor = text.project_per_layer_inputs(hidden, rows.unflatten(-1, shape))
        return mixed

    def call_block(
        self, block: nn.Module, hidden: torch.Tensor, context: BlockContext, layer_type: str
    ) -> torch.Tensor:
        """Call a layer that reads nothing but hidden states; see `call_block_with_states` for the others."""
        return self.call_block_with_states(block, hidden, context, layer_type, {})[0]

    def call_block_with_states(
        self,
        block: nn.Module,
        hidden: torch.Tensor,
        context: BlockContext,
        layer_type: str,
        states: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Call one decoder layer without a cache; shared keys and values go through its own dictionary."""
        attention: Any = block.self_attn
        names = _names(layer_type)
        shared: dict[str, tuple[torch.Tensor, ...]] = {}
        if attention.is_kv_shared_layer:
            # Transformers keeps them as (B, K, T, H), a transposed view.
            shared[layer_type] = tuple(states[name].transpose(1, 2) for name in names)
        output: torch.Tensor = block(
            hidden,
            states.get(PER_LAYER_INPUT),
            shared_kv_states=shared,
            attention_mask=context.attention_masks[layer_type],
            position_ids=context.position_ids,
            position_embeddings=context.position_embeddings[layer_type],
        )
        if not attention.store_full_length_kv:
            return output, {}
        return output, {
            name: tensor.transpose(1, 2) for name, tensor in zip(names, shared[layer_type], strict=True)
        }

    def embedding_scale(self, config: PreTrainedConfig, dtype: torch.dtype) -> torch.Tensor:
        """Return the square root of the hidden size; see `Architecture.embedding_scale`."""
        return torch.tensor(config.hidden_size**0.5).to(dtype)

    def logit_softcap(self, config: PreTrainedConfig) -> float | None:
        """Return the config's value; see `Architecture.logit_softcap`."""
        return config.final_logit_softcapping


def _names(layer_type: str) -> tuple[str, str]:
    """Return the names of a layer type's shared keys and values."""
    return f"{layer_type}.key", f"{layer_type}.value"
