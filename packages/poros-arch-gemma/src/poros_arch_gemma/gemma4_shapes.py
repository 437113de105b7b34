"""Published config values of real Gemma 4 models, cut to fewer blocks where a gate asks for that."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transformers import Gemma4TextConfig

__all__ = ["GEMMA4_SHAPES", "gemma4_real_config"]

# Source: text_config in config.json of the model of that name, as published by its authors; layer types as a period.
GEMMA4_SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gemma-4-31b": {
            "period": 6,
            "num_hidden_layers": 60,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "attention_k_eq_v": True,
            "sliding_window": 1024,
            "max_position_embeddings": 262144,
            "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
        },
        "gemma-4-e2b": {
            "period": 5,
            "num_hidden_layers": 35,
            "num_kv_shared_layers": 20,
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "sliding_window": 512,
            "max_position_embeddings": 131072,
            "hidden_size_per_layer_input": 256,
            "use_double_wide_mlp": True,
        },
    }
)


def gemma4_real_config(name: str, num_blocks: int | None = None) -> Gemma4TextConfig:
    """Return the config of `GEMMA4_SHAPES` ``name``.

    Args:
        num_blocks: cut to so many decoder layers, a multiple of the period of layer types; the share of blocks that
            read another block's keys and values stays.
    """
    values = dict(GEMMA4_SHAPES[name])
    period = values.pop("period")
    whole = values["num_hidden_layers"]
    count = num_blocks or whole
    assert count % period == 0, f"{name} repeats every {period} blocks"
    sharing = {"num_kv_shared_layers": values.get("num_kv_shared_layers", 0) * count // whole}
    layer_types = (["sliding_attention"] * (period - 1) + ["full_attention"]) * (count // period)
    common = {
        "vocab_size": 262144,
        "head_dim": 256,
        "global_head_dim": 512,
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }
    return Gemma4TextConfig(
        **{**values, **common, **sharing, "num_hidden_layers": count, "layer_types": layer_types}
    )
