"""Every family: merged weights load in stock Transformers, and answers are those of stock Transformers and PEFT."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

import poros
from poros.engine.cached_row import CachedRow, supports_cache
from poros.engine.engine import Engine
from poros.export import AdaptedModel, find_adapter, merge, open_with_adapter
from poros.parity.random_model import randomize_adapters
from poros.plugins import Registry
from poros.run.final_adapter import save_final_adapter
from poros.run.generation import stream_tokens

CPU = torch.device("cpu")
PROMPT = (3, 9, 27, 33, 5, 8, 40)
NEW_TOKENS = 12
FLOAT32 = poros.Numerics(
    compute_dtype=torch.float32, storage_dtype=torch.float32, length_bucket=4, loss_chunk_vocabulary=16
)
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": None,
    "pad_token_id": 0,
    "bos_token_id": None,
}
LATER = (17, 2, 44, 44, 9)
# Two implementations of one float32 forward: products in another order, relative to the largest logit (measured below
# 2e-6, CPU, 2026-11-30).
FLOAT32_LOGITS = 1e-5
# Shorter than the prompt, so that the window slides while tokens are added.
WINDOW = 5


def qwen2_sliding() -> PreTrainedConfig:
    window = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
    return transformers.Qwen2Config(**SIZES, **window, tie_word_embeddings=False)


LINEAR = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def qwen3_5_wrapper() -> PreTrainedConfig:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4}
    return transformers.Qwen3_5Config(
        text_config=transformers.Qwen3_5TextConfig(**SIZES, **LINEAR),
        vision_config=transformers.Qwen3_5VisionConfig(**vision, out_hidden_size=32),
    )


GEMMA = {
    "head_dim": 8,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}


def gemma4_dense() -> PreTrainedConfig:
    full = {"global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    return transformers.Gemma4TextConfig(**SIZES, **GEMMA, **full, hidden_size_per_layer_input=0)


def gemma4_shared() -> PreTrainedConfig:
    """Blocks 2 and 3 read what blocks 0 and 1 hand on; every block has an input of its own."""
    shared = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "global_head_dim": 16}
    inputs = {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 61}
    return transformers.Gemma4TextConfig(**SIZES, **GEMMA, **shared, **inputs, tie_word_embeddings=False)


def gemma3_wrapper() -> PreTrainedConfig:
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**SIZES, **GEMMA, query_pre_attn_scalar=8),
        vision_config=transformers.SiglipVisionConfig(**vision, image_size=8, patch_size=4),
        mm_tokens_per_image=4,
        image_token_index=60,
    )


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    function.__name__: function
    for function in (qwen2_sliding, qwen3_5_wrapper, gemma3_wrapper, gemma4_dense, gemma4_shared)
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """A family's name."""
    return str(request.param)


@pytest.fixture(scope="module")
def base(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random bfloat16 checkpoint, as Transformers saves it."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp(family) / "base"
    config = FAMILIES[family]()
    auto = (
        transformers.AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    )
    model = auto.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.2)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    """An adapter of random values on every layer, saved for the class that users load, as a run saves it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # bf16_bitwise is experimental
        opened = poros.open_model(
            base,
            quantization="bf16_bitwise",
            lora=poros.LoraSettings(rank=4, alpha=8, rank_pattern={"o_proj": 2}, use_rslora=True),
            numerics=FLOAT32,
        )
    engine = opened.load(plan=poros.Plan(num_slots=2), device=CPU, seed=0)
    randomize_adapters(engine.model.bank, 5)
    engine.model.bank.weights["lora_B"].mul_(5)
    folder, _ = save_final_adapter(base.parent, opened, engine)
    engine.close()
    return folder


def stock(base: Path, adapter: Path) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted: torch.nn.Module = peft.PeftModel.from_pretrained(model, adapter)
    return adapted.eval()


@pytest.mark.filterwarnings("ignore:EXPERIMENTAL")
def test_an_adapter_of_the_class_that_users_load_is_the_start_of_another_run(
    base: Path, adapter: Path
) -> None:
    lora = poros.LoraSettings(
        rank=4, alpha=8, rank_pattern={"o_proj": 2}, use_rslora=True, init_from=str(adapter)
    )
    model = poros.open_model(base, quantization="bf16_bitwise", lora=lora, numerics=FLOAT32)
    engine = model.load(plan=poros.Plan(num_slots=2), device=CPU, seed=1)
    saved = {
        key.partition(".layers.")[2]: t for key, t in load_file(adapter / "adapter_model.safetensors").items()
    }
    found = {key.partition(".layers.")[2]: t for key, t in engine.model.adapter_tensors().items()}
    assert found.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[key]) for key, tensor in found.items())
    engine.close()


@pytest.fixture(scope="module")
def opened(base: Path, adapter: Path, registry: Registry) -> AdaptedModel:
    """Base and adapter, without weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return open_with_adapter(
            base, find_adapter(adapter), quantization="bf16_bitwise", numerics=FLOAT32, registry=registry
        )


def load(opened: AdaptedModel, plan: poros.Plan) -> Engine:
    engine = opened.model.load(plan=plan, device=CPU, seed=0)
    opened.fill(engine.model)
    return engine


STREAMED = poros.Plan(num_slots=2, head="host")


def test_greedy_tokens_are_those_of_stock_generate(opened: AdaptedModel, base: Path, adapter: Path) -> None:
    prompt = torch.tensor([PROMPT])
    model: Any = stock(base, adapter)
    expected = model.generate(
        input_ids=prompt, max_new_tokens=NEW_TOKENS, do_sample=False, attention_mask=torch.ones_like(prompt)
    )
    engine = load(opened, poros.Plan(residency="resident"))
    found = list(stream_tokens(engine, PROMPT, max_new_tokens=NEW_TOKENS, stop_ids=()))
    engine.close()
    assert found == expected[0, len(PROMPT) :].tolist()


@torch.no_grad()
def test_logits_behind_a_cache_are_those_of_a_whole_row(
    opened: AdaptedModel, base: Path, adapter: Path
) -> None:
    engine = load(opened, STREAMED)
    assert supports_cache(engine)
    row = CachedRow(engine)
    found = [row.append(PROMPT), *(row.append([token]) for token in LATER)]
    engine.close()
    expected = stock(base, adapter)(torch.tensor([[*PROMPT, *LATER]])).logits[0, len(PROMPT) - 1 :]
    assert float((torch.cat(found) - expected).abs().max()) < FLOAT32_LOGITS * float(expected.abs().max())


def test_the_merged_folder_is_a_text_model_that_stock_transformers_loads(
    base: Path, adapter: Path, registry: Registry, tmp_path: Path, family: str
) -> None:
    report = merge(
        find_adapter(adapter), base, tmp_path / "merged", registry=registry, probe=lambda _: PROMPT
    )
    model, info = AutoModelForCausalLM.from_pretrained(
        report.folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(model).__name__ == report.model_class
    assert not hasattr(model.config, "vision_config")
    merged: Any = stock(base, adapter)
    merged = merged.merge_and_unload()
    expected = {
        name.replace("language_model.", ""): tensor.to(torch.bfloat16)
        for name, tensor in merged.state_dict().items()
        if "vision" not in name and "visual" not in name
    }
    found = load_file(report.folder / "model.safetensors")
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    assert ("lm_head.weight" in found) is not model.config.tie_word_embeddings
    assert any("text model alone" in note for note in report.notes) is family.endswith("wrapper")
