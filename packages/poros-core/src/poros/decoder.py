"""A base for decoder-only families whose layers Transformers calls the way Llama and Qwen2 do."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from poros.errors import ArchitectureError, explain
from poros.interfaces import Architecture, BlockContext, ModelParts

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedConfig

__all__ = ["DecoderArchitecture", "Tables", "causal_masks", "refuse_feature"]

# Per layer type, (cos, sin).
Tables = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


def refuse_feature(
    config: PreTrainedConfig, *, expected: str, got: object, where: str, next_step: str
) -> ArchitectureError:
    """Return the error for a feature inside a known type; ``where`` is the field of config.json."""
    return ArchitectureError(
        explain(
            f"Unsupported feature inside `{config.model_type}`",
            expected=expected,
            got=f"`{got}`",
            where=f"config.json, {where}",
            next_step=next_step,
        )
    )


class DecoderArchitecture(Architecture):
    """Masks and rotary tables per layer type, blocks at ``model.layers``: a family on this base is about 20 lines.

    A subclass states ``name``, ``model_types`` and, where they differ, ``default_targets``. Of a multimodal wrapper
    only the text model is built.
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
    # Rotary types whose tables do not depend on the length of the sequence at hand.
    rope_types: ClassVar[tuple[str, ...]] = ("default", "linear", "llama3", "yarn")
    layer_types: ClassVar[tuple[str, ...]] = ("full_attention", "sliding_attention")

    def check_config(self, config: PreTrainedConfig) -> None:
        """Refuse a foreign text model, unknown layer types and rotary tables that follow the sequence's length.

        See `Architecture.check_config`.
        """
        text = self.text_config(config)
        if text.model_type not in self.model_types:
            raise refuse_feature(
                config,
                expected=f"a text model of type {list(self.model_types)}",
                got=text.model_type,
                where="text_config.model_type",
                next_step="Train the text model by itself if Poros knows its type",
            )
        for index in range(text.num_hidden_layers):
            if (layer_type := self.layer_type(text, index)) not in self.layer_types:
                raise refuse_feature(
                    config,
                    expected=f"layer types among {list(self.layer_types)}",
                    got=layer_type,
                    where=f"layer_types[{index}]",
                    next_step="Use another model of this family",
                )
        self._check_attention(config, text)
        for where, rope in _rope_parameters(text):
            rope_type = rope.get("rope_type", "default")
            if rope_type not in self.rope_types:
                raise refuse_feature(
                    config,
                    expected=f"a rotary type among {list(self.rope_types)}",
                    got=rope_type,
                    where=f"{where}.rope_type",
                    next_step="Remove the rope scaling from config.json if the run's lengths do not need it",
                )
            base = rope.get("rope_theta", 1.0)
            if isinstance(base, bool) or not isinstance(base, int | float) or not 0 < base < float("inf"):
                raise refuse_feature(
                    config,
                    expected="a positive number as the rotary base",
                    got=base,
                    where=f"{where}.rope_theta",
                    next_step="Download config.json again",
                )

    def _check_attention(self, config: PreTrainedConfig, text: PreTrainedConfig) -> None:
        """Refuse heads that do not share evenly and windows that show nothing: layers fail late, or compute NaN."""
        own = (
            getattr(text, "per_layer_attributes", None) or ()
        )  # no single value is in effect, and reading one raises
        heads, groups, window = (
            None if name in own else getattr(text, name, None)
            for name in ("num_attention_heads", "num_key_value_heads", "sliding_window")
        )
        if isinstance(heads, int) and isinstance(groups, int) and (groups <= 0 or heads % groups):
            raise refuse_feature(
                config,
                expected=f"a divisor of `num_attention_heads` ({heads})",
                got=groups,
                where="num_key_value_heads",
                next_step="Download config.json again",
            )
        types = {self.layer_type(text, index) for index in range(text.num_hidden_layers)}
        slides = "sliding_attention" in types and "sliding_window" not in own
        if slides and not (isinstance(window, int) and window > 0):
            raise refuse_feature(
                config,
                expected="a positive number of tokens, because some layers slide",
                got=window,
                where="sliding_window",
                next_step="Download config.json again",
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
        return str(layer_types[block_index]) if layer_types else "full_attention"

    def context(
        self, model: nn.Module, *, batch: int, tokens: int, device: torch.device, dtype: torch.dtype
    ) -> BlockContext:
        """Build tables with Transformers' own rotary module and mask functions; see `Architecture.context`."""
        return self._context(model, (batch, tokens), device, dtype)

    def cached_context(
        self,
        model: nn.Module,
        *,
        past: int,
        tokens: int,
        cache: Cache,
        device: torch.device,
        dtype: torch.dtype,
    ) -> BlockContext | None:
        """Build the same behind ``past`` cached positions; see `Architecture.cached_context`."""
        if type(self).context is not DecoderArchitecture.context:
            return None  # what a subclass changed there would be missing here
        return self._context(model, (1, tokens), device, dtype, past=past, cache=cache)

    def _context(
        self,
        model: nn.Module,
        shape: tuple[int, int],
        device: torch.device,
        dtype: torch.dtype,
        *,
        past: int = 0,
        cache: Cache | None = None,
    ) -> BlockContext:
        config: PreTrainedConfig = model.config
        batch, tokens = shape
        position_ids = torch.arange(past, past + tokens, device=device)[None]
        hidden = torch.empty(batch, tokens, config.hidden_size, device=device, dtype=dtype)
        types = sorted({self.layer_type(config, index) for index in range(config.num_hidden_layers)})
        # The inverse frequencies are computed on the CPU, as they are when Transformers loads a model: another
        # device's pow rounds differently.
        with torch.device("cpu"):
            rotary = type(model.get_submodule("model.rotary_emb"))(config=config).to(device)
        with torch.no_grad():
            tables = self.rotary_tables(rotary, hidden, position_ids, types)
        return BlockContext(
            position_ids=position_ids,
            position_embeddings=tables,
            attention_masks=causal_masks(config, types, hidden, position_ids, cache),
        )

    def rotary_tables(
        self, rotary: nn.Module, hidden: torch.Tensor, position_ids: torch.Tensor, types: Collection[str]
    ) -> Tables:
        """Return (cos, sin) per layer type from Transformers' rotary module; here all of them share one table.

        Args:
            rotary: the model's rotary module, on the device of ``hidden``.
            hidden: (B, T, D), only its dtype and device matter.
            position_ids: (1, T).
            types: the layer types that the model has.
        """
        return dict.fromkeys(types, rotary(hidden, position_ids))

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


def _rope_parameters(config: PreTrainedConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (field, parameters) of every rotary table; some families have one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = {name: value for name, value in parameters.items() if isinstance(value, Mapping)}
    if nested:
        yield from ((f"rope_parameters.{name}", value) for name, value in nested.items())
    else:
        yield "rope_parameters", parameters


def causal_masks(
    config: PreTrainedConfig,
    layer_types: Sequence[str],
    hidden: torch.Tensor,
    position_ids: torch.Tensor,
    cache: Cache | None = None,
) -> dict[str, torch.Tensor | None]:
    """Return Transformers' own mask of every layer type, None where the layer needs none.

    SDPA's causal path needs none, and the only mask of linear attention is of padding: what lies right of a token does
    not reach it.

    Args:
        config: of the text model.
        layer_types: ``full_attention``, ``sliding_attention``, ``linear_attention``.
        hidden: (B, T, D), only its shape, dtype and device matter.
        position_ids: (1, T).
        cache: of the positions before, or None.
    """
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    makers = {
        "full_attention": create_causal_mask,
        "sliding_attention": create_sliding_window_causal_mask,
    }
    return {
        layer_type: None
        if layer_type == "linear_attention"
        else makers[layer_type](
            config=config,
            inputs_embeds=hidden,
            attention_mask=None,
            position_ids=position_ids,
            **{cache_keyword(makers[layer_type]): cache},
        )
        for layer_type in layer_types
    }


def cache_keyword(function: object) -> str:
    """Return how a mask function or a layer calls its cache: Transformers renamed ``past_key_values`` to ``cache``."""
    return "cache" if "cache" in inspect.signature(function).parameters else "past_key_values"  # type: ignore[arg-type]
