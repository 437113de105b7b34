"""Published config values of real Qwen models, for gates with seeded random weights at real sizes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig, Qwen2Config, Qwen3_5TextConfig, Qwen3Config

__all__ = ["REAL_SHAPES", "real_config"]

_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}
_QWEN25 = {"vocab_size": 152064, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768} | _ROPE
_QWEN3 = {
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "head_dim": 128,
} | _ROPE
# Three blocks of linear attention, then a full one: Transformers' default where no layer types are given.
_QWEN35 = {
    "vocab_size": 248320,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
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


# Source: config.json of the model of that name, as published by its authors; of wrappers the text_config.
REAL_SHAPES: Mapping[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = MappingProxyType(
    {
        "qwen2.5-7b": (Qwen2Config, _shape(28, 3584, 18944, 28, 4) | _QWEN25),
        "qwen2.5-32b": (Qwen2Config, _shape(64, 5120, 27648, 40, 8) | _QWEN25),
        "qwen2.5-72b": (Qwen2Config, _shape(80, 8192, 29568, 64, 8) | _QWEN25),
        "qwen3-8b": (Qwen3Config, _shape(36, 4096, 12288, 32, 8) | _QWEN3),
        "qwen3-32b": (Qwen3Config, _shape(64, 5120, 25600, 64, 8) | _QWEN3),
        "qwen3.5-27b": (
            Qwen3_5TextConfig,
            _shape(64, 5120, 17408, 24, 4) | _QWEN35 | {"linear_num_value_heads": 48},
        ),
    }
)


def real_config(name: str, num_blocks: int | None = None) -> PreTrainedConfig:
    """Return the config of `REAL_SHAPES` ``name``, cut to ``num_blocks`` decoder layers if given."""
    config_class, values = REAL_SHAPES[name]
    if num_blocks is not None:
        values = values | {"num_hidden_layers": num_blocks}
    return config_class(**copy.deepcopy(values), tie_word_embeddings=False)
