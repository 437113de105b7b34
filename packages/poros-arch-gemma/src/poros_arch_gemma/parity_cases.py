"""Tiny models that hit every branch of the Gemma layers; the gates run on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from transformers import Gemma3Config, Gemma3TextConfig

from poros.interfaces import ParityCase
from poros_arch_gemma.gemma4_cases import GEMMA4_CASES

__all__ = ["PARITY_CASES"]

# Sizes that are no multiple of the quantization block, so that blocks run across rows.
SIZES = MappingProxyType(
    {
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
        "vocab_size": 131,
        "max_position_embeddings": 64,
    }
)

# A window that the rows outgrow, and two rotary bases of which one is scaled as in the published models.
LAYER_TYPES = (
    "sliding_attention",
    "sliding_attention",
    "full_attention",
    "sliding_attention",
    "full_attention",
)
ROPE: Mapping[str, Any] = MappingProxyType(
    {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    }
)
SOFTCAP = 5.0

# Adapters on some blocks only, not on the first, with different ranks: several block kinds, backward stops early.
SPARSE_LORA: Mapping[str, Any] = MappingProxyType(
    {
        "rank": 4,
        "dropout": 0.3,
        "blocks": (1, 2, 4),
        "rank_pattern": {r"layers\.2\.self_attn\.q_proj": 8, r"layers\.4\.mlp\.down_proj": 2},
        "use_rslora": True,
    }
)


# Unequal rows, of which some outgrow the window; sums of three micro-batches show their order.
ROWS = ((9, 4), (14, 3), (7,))


def _gemma3(**changes: Any) -> Gemma3TextConfig:
    values = {
        **SIZES,
        "num_hidden_layers": len(LAYER_TYPES),
        "layer_types": list(LAYER_TYPES),
        "sliding_window": 6,
        "rope_parameters": {name: dict(values) for name, values in ROPE.items()},
    }
    return Gemma3TextConfig(**{**values, **changes})


def _gemma3_softcapped() -> Gemma3TextConfig:
    return _gemma3(final_logit_softcapping=SOFTCAP, tie_word_embeddings=False)


def _gemma3_wrapper() -> Gemma3Config:
    """Return a wrapper config; its vision tower is never built."""
    return Gemma3Config(text_config=_gemma3())


PARITY_CASES = (
    ParityCase(name="gemma3-nf4", architecture="gemma3", make_config=_gemma3, row_lengths=ROWS, num_steps=3),
    ParityCase(
        name="gemma3-nf4-float32",
        architecture="gemma3",
        make_config=_gemma3_softcapped,
        row_lengths=ROWS,
        compute_dtype=torch.float32,
    ),
    ParityCase(
        name="gemma3-nf4-sparse-dropout",
        architecture="gemma3",
        make_config=_gemma3,
        row_lengths=ROWS,
        lora=SPARSE_LORA,
    ),
    ParityCase(
        name="gemma3-bf16-wrapper",
        architecture="gemma3",
        make_config=_gemma3_wrapper,
        row_lengths=ROWS,
        weight_format="bf16_bitwise",
        num_steps=3,
    ),
    *GEMMA4_CASES,
)
