"""Tiny Gemma 4 models that hit every kind of block; the gates run on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from transformers import Gemma4TextConfig

from poros.interfaces import ParityCase

__all__ = ["GEMMA4_CASES", "gemma4_dense", "gemma4_shared"]

SLIDING, FULL = "sliding_attention", "full_attention"

# No size is a multiple of the quantization block; the square root of neither hidden size is exact in 16 bits.
SIZES = MappingProxyType(
    {
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "vocab_size": 131,
        "vocab_size_per_layer_input": 131,
        "max_position_embeddings": 64,
        "sliding_window": 6,
        "final_logit_softcapping": 5.0,
    }
)


def gemma4_dense(**changes: Any) -> Gemma4TextConfig:
    """Return a 31B-like config: larger heads, fewer key/value heads and no `v_proj` in full layers."""
    values = {
        "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
        "num_hidden_layers": 5,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": True,
    }
    return Gemma4TextConfig(**{**SIZES, **values, **changes})


def gemma4_shared(**changes: Any) -> Gemma4TextConfig:
    """Return an E2B-like config: both layer types shared, wider MLPs where they are, per-layer inputs.

    Blocks 1 and 2 hand on keys and values: of sliding layers to blocks 3 and 4, of full ones to block 5.
    """
    values = {
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 3,
        "num_key_value_heads": 1,
        "hidden_size_per_layer_input": 12,
        "use_double_wide_mlp": True,
        "tie_word_embeddings": False,
    }
    return Gemma4TextConfig(**{**SIZES, **values, **changes})


# Sliding keys and values come from below the lowest adapted block and get no gradient, full ones do. Block 4 has other
# ranks than block 3, block 5 has no adapter and still sends a gradient to block 2.
SPARSE_LORA: Mapping[str, Any] = MappingProxyType(
    {
        "rank": 4,
        "dropout": 0.3,
        "blocks": (2, 3, 4),
        "rank_pattern": {r"layers\.4\.self_attn\.q_proj": 8, r"layers\.2\.self_attn\.k_proj": 2},
        "use_rslora": True,
    }
)

# Attention scores have no scale of their own: trained norms of queries and keys hold it. Around one they would saturate
# the softmax, and 16 bits would leave little of any gradient, PEFT's own included.
SCORE_NORMS: Mapping[str, float] = MappingProxyType({"q_norm.weight": 0.5, "k_norm.weight": 0.5})

# A step of these costs more than its arithmetic: three of them, and as many micro-batches, keep the gates short. Both
# widths lie beyond the sliding window.
_case = partial(
    ParityCase,
    architecture="gemma4",
    row_lengths=((9, 4), (11,), (7,)),
    num_steps=3,
    weight_factors=SCORE_NORMS,
)

GEMMA4_CASES = (
    _case(name="gemma4-dense-bf16", make_config=gemma4_dense, weight_format="bf16_bitwise"),
    _case(name="gemma4-shared-nf4-float32", make_config=gemma4_shared, compute_dtype=torch.float32),
    _case(
        name="gemma4-shared-nf4-sparse-dropout",
        make_config=partial(gemma4_shared, tie_word_embeddings=True),
        lora=SPARSE_LORA,
    ),
)
