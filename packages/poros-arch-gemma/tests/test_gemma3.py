"""What is particular to Gemma 3: rotary bases, the embedding's scale, rows longer than the window, refused features."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import Gemma3Config, Gemma3TextConfig

from poros.architecture import blockwise_arch_check
from poros.determinism import configure
from poros.errors import ArchitectureError
from poros.parity.case_run import case_meta, start_case
from poros.plugins import load_registry
from poros.run import describe_model
from poros.settings import Plan
from poros_arch_gemma.architectures import Gemma3
from poros_arch_gemma.parity_cases import PARITY_CASES
from poros_arch_gemma.real_shapes import real_config

CASE = PARITY_CASES[0]
CPU = torch.device("cpu")


def test_sliding_and_full_layers_turn_by_bases_of_their_own() -> None:
    meta, _ = case_meta(CASE, load_registry())
    context = Gemma3().context(meta.module, batch=1, tokens=9, device=CPU, dtype=torch.float32)
    sliding, full = (context.position_embeddings[f"{kind}_attention"][0] for kind in ("sliding", "full"))
    assert not torch.equal(sliding, full)
    assert context.attention_masks["sliding_attention"] is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_embedding_scale_is_rounded_to_the_dtype_that_it_multiplies_in(dtype: torch.dtype) -> None:
    scale = Gemma3().embedding_scale(Gemma3TextConfig(hidden_size=3072, num_attention_heads=8), dtype)
    assert scale.dtype == dtype
    assert float(scale) == (55.5 if dtype == torch.bfloat16 else pytest.approx(55.42563))


def test_two_rows_of_which_one_outgrows_the_window_train_with_finite_gradients() -> None:
    configure(CPU)
    run = start_case(
        replace(CASE, row_lengths=((5, 40),), num_steps=3), Plan(num_slots=2), load_registry(), CPU
    )
    assert run.train(3).finite()


def test_soft_capped_attention_is_refused() -> None:
    config = Gemma3TextConfig(num_hidden_layers=2, attn_logit_softcapping=50.0)
    with pytest.raises(ArchitectureError, match=r"feature inside `gemma3_text`.*attn_logit_softcapping"):
        blockwise_arch_check(config, load_registry())


def test_a_wrapper_around_another_text_model_is_refused() -> None:
    config = Gemma3Config()
    config.text_config.model_type = "llama"
    with pytest.raises(ArchitectureError, match=r"feature inside `gemma3`.*got `llama`"):
        blockwise_arch_check(config, load_registry())


def test_a_real_shape_has_one_kind_per_attention() -> None:
    _, _, meta = describe_model(real_config("gemma-3-27b", 6))
    assert [kind.blocks for kind in meta.kinds] == [(0, 1, 2, 3, 4), (5,)]
