"""A row that grows behind a cache gives what the whole row gives."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from transformers import LlamaConfig

from poros import hookimpl
from poros.decoder import DecoderArchitecture, cache_keyword
from poros.engine.cached_row import CachedRow
from poros.interfaces import BlockContext, ParityCase
from poros.parity.case_run import start_case
from poros.plugins import load_registry
from poros.settings import Plan


def tiny() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )


class Cacheless(DecoderArchitecture):
    """Says in every call that there is no cache, as training has none."""

    name: ClassVar[str] = "cacheless"
    model_types: ClassVar[tuple[str, ...]] = ("llama",)

    def call_block(
        self, block: nn.Module, hidden: torch.Tensor, context: BlockContext, layer_type: str
    ) -> torch.Tensor:
        output: torch.Tensor = block(
            hidden,
            attention_mask=context.attention_masks[layer_type],
            position_ids=context.position_ids,
            position_embeddings=context.position_embeddings[layer_type],
            **{cache_keyword(block.forward): None},
        )
        return output


class Plugin:
    """Registers it."""

    @hookimpl
    def poros_register_architectures(self) -> tuple[type[DecoderArchitecture], ...]:
        return (Cacheless,)


def test_a_call_without_a_cache_gets_the_cache() -> None:
    case = ParityCase(
        name="cacheless",
        architecture="cacheless",
        make_config=tiny,
        compute_dtype=torch.float32,
        row_lengths=((5,),),
        lora={"rank": 2},
        num_steps=1,
    )
    registry = load_registry([("examined", "the plugin", Plugin())])
    run = start_case(case, Plan(num_slots=2), registry, torch.device("cpu"))
    try:
        ids = [3, 4, 5, 6, 7, 8]
        whole = CachedRow(run.engine).append(ids)
        row = CachedRow(run.engine)
        for token in ids:
            last = row.append([token])
    finally:
        run.close()
    assert float((last - whole).abs().max()) <= 1e-5 * float(whole.abs().max())
