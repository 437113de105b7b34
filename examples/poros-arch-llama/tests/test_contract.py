"""The whole contract of an architecture, examined by Poros' conformance kit on a tiny config."""

from __future__ import annotations

from poros_arch_llama import plugin
from transformers import LlamaConfig

from poros.testing import assert_contract


def tiny() -> LlamaConfig:
    """Four blocks, grouped heads, biases and tied embeddings: every branch that Llama's layers have."""
    return LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    )


def test_the_contract_holds() -> None:
    print(assert_contract(plugin, tiny))
