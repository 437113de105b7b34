"""Tiny models that hit every branch of the Qwen layers; the gates run on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from transformers import Qwen2Config, Qwen3_5Config, Qwen3_5TextConfig, Qwen3Config

from poros.interfaces import ParityCase

__all__ = ["PARITY_CASES"]

NUM_BLOCKS = 5

# Sizes that are no multiple of the quantization block, so that blocks run across rows.
SIZES = MappingProxyType(
    {
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": NUM_BLOCKS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 131,
        "max_position_embeddings": 64,
    }
)

# Adapters on some blocks only, not on the first, with different ranks: three block kinds, backward stops early.
SPARSE_LORA: Mapping[str, Any] = MappingProxyType(
    {
        "rank": 4,
        "dropout": 0.3,
        "blocks": (1, 2, 4),
        "rank_pattern": {r"layers\.2\.self_attn\.q_proj": 8, r"layers\.4\.mlp\.down_proj": 2},
        "use_rslora": True,
    }
)


def _qwen2(**changes: Any) -> Qwen2Config:
    return Qwen2Config(**{**SIZES, "tie_word_embeddings": False, **changes})


def _qwen3(**changes: Any) -> Qwen3Config:
    return Qwen3Config(**{**SIZES, "head_dim": 16, "tie_word_embeddings": False, **changes})


SLIDING = MappingProxyType({"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2})

# Linear attention: fewer key than value heads, head sizes that differ.
HYBRID_LAYER_TYPES = (*("linear_attention",) * 3, "full_attention", "linear_attention")
HYBRID = MappingProxyType(
    {
        "head_dim": 32,
        "layer_types": list(HYBRID_LAYER_TYPES),
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
)
HYBRID_SPARSE_LORA: Mapping[str, Any] = MappingProxyType(
    {
        **SPARSE_LORA,
        "blocks": (1, 3, 4),
        "rank_pattern": {r"layers\.3\.self_attn\.q_proj": 8, r"layers\.4\.linear_attn\.in_proj_qkv": 2},
    }
)
# Linear attention works in chunks of 64 tokens: rows of several, and one that ends inside its last.
LONG_ROWS = ((70, 3), (66,))
# Sums of three micro-batches show their order in float32; in 16 bits so few tokens leave gradients near rounding.
SHORT_ROWS = ((9, 4), (14, 3), (7,))


def _qwen3_5(**changes: Any) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(**{**SIZES, **HYBRID, "tie_word_embeddings": False, **changes})


def _qwen3_5_wrapper() -> Qwen3_5Config:
    """Return a wrapper config; its vision tower is never built."""
    return Qwen3_5Config(text_config=_qwen3_5(max_position_embeddings=128))


DENSE_CASES = tuple(
    case
    for name, make in (("qwen2", _qwen2), ("qwen3", _qwen3))
    for case in (
        ParityCase(name=f"{name}-nf4", architecture=name, make_config=make),
        ParityCase(
            name=f"{name}-nf4-float32", architecture=name, make_config=make, compute_dtype=torch.float32
        ),
        ParityCase(
            name=f"{name}-nf4-sparse-dropout",
            architecture=name,
            make_config=partial(make, tie_word_embeddings=True),
            lora=SPARSE_LORA,
        ),
        ParityCase(
            name=f"{name}-bf16-sliding",
            architecture=name,
            make_config=partial(make, **SLIDING),
            weight_format="bf16_bitwise",
        ),
    )
)

HYBRID_CASES = (
    ParityCase(name="qwen3_5-nf4", architecture="qwen3_5", make_config=_qwen3_5, num_steps=3),
    ParityCase(
        name="qwen3_5-nf4-float32",
        architecture="qwen3_5",
        make_config=_qwen3_5,
        row_lengths=SHORT_ROWS,
        compute_dtype=torch.float32,
    ),
    ParityCase(
        name="qwen3_5-nf4-sparse-dropout",
        architecture="qwen3_5",
        make_config=partial(_qwen3_5, tie_word_embeddings=True),
        lora=HYBRID_SPARSE_LORA,
    ),
    ParityCase(
        name="qwen3_5-bf16-wrapper",
        architecture="qwen3_5",
        make_config=_qwen3_5_wrapper,
        weight_format="bf16_bitwise",
        row_lengths=LONG_ROWS,
        num_steps=3,
    ),
)

PARITY_CASES = (*DENSE_CASES, *HYBRID_CASES)
