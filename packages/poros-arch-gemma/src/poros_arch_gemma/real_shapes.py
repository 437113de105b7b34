"""Published config values of real Gemma models, for gates with seeded random weights at real sizes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transformers import Gemma3TextConfig, PreTrainedConfig

from poros_arch_gemma.gemma4_shapes import GEMMA4_SHAPES, gemma4_real_config

__all__ = ["REAL_SHAPES", "real_config"]

# Five sliding blocks, then a full one: Transformers' default where no layer types are given.
_GEMMA3 = {
    "vocab_size": 262208,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    },
}


def _shape(blocks: int, hidden: int, intermediate: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "num_hidden_layers": blocks,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


# Source: text_config in config.json of the model of that name, as published by its authors.
REAL_SHAPES: Mapping[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = MappingProxyType(
    {
        "gemma-3-12b": (
            Gemma3TextConfig,
            _shape(48, 3840, 15360, 16, 8) | _GEMMA3 | {"head_dim": 256, "query_pre_attn_scalar": 256},
        ),
        "gemma-3-27b": (
            Gemma3TextConfig,
            _shape(62, 5376, 21504, 32, 16) | _GEMMA3 | {"head_dim": 128, "query_pre_attn_scalar": 168},
        ),
    }
)


def real_config(name: str, num_blocks: int | None = None) -> PreTrainedConfig:
    """Return the config of `REAL_SHAPES` or `GEMMA4_SHAPES` ``name``, cut to ``num_blocks`` layers if given."""
    if name in GEMMA4_SHAPES:
        return gemma4_real_config(name, num_blocks)
    config_class, values = REAL_SHAPES[name]
    if num_blocks is not None:
        values = values | {"num_hidden_layers": num_blocks}
    return config_class(**copy.deepcopy(values), tie_word_embeddings=True)
