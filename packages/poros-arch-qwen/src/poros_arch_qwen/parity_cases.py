"""Tiny models that hit every branch of the Qwen layers; the gates run on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from transformers import Qwen2Config, Qwen3Config

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

PARITY_CASES = tuple(
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
