"""Gemma 3 wrappers: the text tower is trained, no vision tower is adapted, and every user can load the result."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    SiglipVisionConfig,
)

import poros
from poros.adapters import lora_layers
from poros.checkpoint import load_adapter, load_config, move_adapter
from poros.engine.engine import Engine
from poros.errors import CheckpointError, ConfigError
from poros.run import describe_model
from poros.settings import LoraSettings, Numerics, Plan

VOCABULARY = 61
# Two implementations of one float32 forward, measured 2026-11-30 on x86-64: below 1e-6; the contract's bound.
FLOAT32_TOLERANCE = 1e-5
FLOAT32 = Numerics(compute_dtype=torch.float32, length_bucket=4)


def wrapper_config() -> Gemma3Config:
    text = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    )
    vision = SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    return Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=60)


@dataclass
class Rows:
    """Two right-padded rows; the second is longer than the window."""

    input_ids: torch.Tensor
    labels: torch.Tensor


def rows(width: int = 12) -> Rows:
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.zeros(2, width, dtype=torch.int64), torch.full((2, width), -100)
    for row, length in enumerate((5, 11)):
        ids[row, :length] = torch.randint(1, 59, (length,), generator=generator)
        labels[row, 1:length] = ids[row, 1:length]
    return Rows(ids, labels)


class OneStep:
    """A step source of a single step."""

    num_steps, fingerprint = 1, "one"

    def step(self, index: int) -> list[Rows]:
        return [rows()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random wrapper checkpoint in bfloat16, as Transformers saves it."""
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("gemma3")
    Gemma3ForConditionalGeneration(wrapper_config()).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The adapter of one step on the wrapper, and what the run reports of it."""
    output = tmp_path_factory.mktemp("run")
    opened = poros.open_model(folder, lora=LoraSettings(rank=2, blocks=(0, 2)))
    settings = poros.RunSettings(output=output, device="cpu")
    with poros.Trainer(opened, OneStep(), settings) as trainer:  # type: ignore[arg-type]
        result = trainer.run()
    assert result.adapter is not None
    return result.adapter, result.adapter_report


def changed(folder: Path, target: Path, change: Any) -> Path:
    """Copy a checkpoint with other tensor names: ``change`` returns a new mapping."""
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    save_file(
        {
            name: tensor.contiguous()
            for name, tensor in change(load_file(folder / "model.safetensors")).items()
        },
        target / "model.safetensors",
    )
    return target


def evaluated(folder: Path, batch: Rows) -> float:
    engine: Engine = poros.open_model(folder, quantization="bf16_bitwise", numerics=FLOAT32).load(
        plan=Plan(num_slots=2), device=torch.device("cpu"), seed=1
    )
    total, count = engine.evaluate([batch])
    engine.close()
    return total / count


# ---- what is trained


@pytest.mark.filterwarnings("ignore:EXPERIMENTAL")
def test_the_loss_is_that_of_the_wrapper_in_training_with_zero_token_types(folder: Path) -> None:
    """In training mode the wrapper refuses to run without token types."""
    batch = rows()
    theirs = Gemma3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).train()
    with torch.no_grad():
        logits = theirs(input_ids=batch.input_ids, token_type_ids=torch.zeros_like(batch.input_ids)).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, VOCABULARY), batch.labels[:, 1:].reshape(-1)
    )
    assert evaluated(folder, batch) == pytest.approx(loss.item(), abs=FLOAT32_TOLERANCE)


@pytest.mark.filterwarnings("ignore:EXPERIMENTAL")
def test_padding_changes_no_real_token(folder: Path) -> None:
    assert evaluated(folder, rows(12)) == pytest.approx(evaluated(folder, rows(28)), abs=FLOAT32_TOLERANCE)


def test_sizes_that_a_wrapper_leaves_out_are_its_text_class_s_own(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "num_hidden_layers": 4, "hidden_size": 64}
    config = {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, _, meta = describe_model(load_config(tmp_path))
    assert meta.config.vocab_size == Gemma3TextConfig().vocab_size
    assert len(meta.blocks) == 4
    assert meta.wrapper is not None


# ---- targets


def test_every_linear_layer_means_those_of_the_text_tower() -> None:
    _, _, meta = describe_model(wrapper_config(), lora=LoraSettings(rank=2, targets=("all-linear",)))
    assert len(list(lora_layers(meta.module))) == 3 * 7


@pytest.mark.parametrize("target", [r".*vision_tower.*q_proj", "multi_modal_projector", "vision_tower.fc1"])
def test_a_target_that_reaches_a_tower_is_refused_with_the_path_or_as_unknown(target: str) -> None:
    expected = r"reaches outside the text model.*vision_tower" if "*" in target else "matches no module"
    with pytest.raises(ConfigError, match=expected):
        describe_model(wrapper_config(), lora=LoraSettings(rank=2, targets=(target,)))


# ---- the adapter


def test_the_adapter_is_saved_for_the_class_that_auto_gives_and_holds_no_vision_key(
    adapter: tuple[Path, Any],
) -> None:
    folder, report = adapter
    assert (report.base_class, report.blocks) == (
        "Gemma3ForConditionalGeneration",
        "model.language_model.layers",
    )
    _, tensors = load_adapter(folder)
    assert len(tensors) == 2 * 2 * 7
    assert not [name for name in tensors if "vision" in name]


def test_stock_peft_loads_it_onto_the_wrapper_with_its_effect(
    folder: Path, adapter: tuple[Path, Any]
) -> None:
    base = Gemma3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    ids = rows().input_ids
    with torch.no_grad():
        before = base(input_ids=ids).logits
        after = PeftModel.from_pretrained(base, adapter[0]).eval()(input_ids=ids).logits
    assert not torch.equal(before, after)


def test_the_text_only_class_refuses_it_by_the_path(adapter: tuple[Path, Any]) -> None:
    with pytest.raises(ValueError, match=re.escape(r"model\.language_model\.layers")):
        PeftModel.from_pretrained(Gemma3ForCausalLM(wrapper_config().text_config), adapter[0])


def test_moved_to_the_text_path_it_loads_onto_the_text_only_class(
    adapter: tuple[Path, Any], tmp_path: Path
) -> None:
    old, new = "model.language_model.layers", "model.layers"
    moved = move_adapter(adapter[0], tmp_path / "moved", old=old, new=new)
    model = PeftModel.from_pretrained(Gemma3ForCausalLM(wrapper_config().text_config), moved)
    _, tensors = load_adapter(moved)
    loaded = dict(model.named_parameters())
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name.replace(".weight", ".default.weight")].data, tensor)


# ---- the checkpoint


def test_a_missing_text_tensor_is_fatal_and_named(folder: Path, tmp_path: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = next(n for n in tensors if n.endswith("layers.1.mlp.up_proj.weight"))
        return {(n + "_renamed" if n == name else n): t for n, t in tensors.items()}

    with pytest.raises(CheckpointError, match=r"1 missing: `[^`]*layers\.1\.mlp\.up_proj\.weight`"):
        poros.open_model(changed(folder, tmp_path / "renamed", rename))


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_both_layouts_of_a_wrapper_s_checkpoint_are_read(prefix: str, folder: Path, tmp_path: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            re.sub(r"^(model\.language_model|language_model\.model)\.", prefix, n): t
            for n, t in tensors.items()
        }

    opened = poros.open_model(changed(folder, tmp_path / "renamed", rename))
    assert opened.source.shape("model.norm.weight") == (32,)


@pytest.mark.filterwarnings("ignore:EXPERIMENTAL:UserWarning")
def test_the_drop_in_module_saves_for_the_class_that_auto_gives(
    folder: Path, adapter: tuple[Path, Any], tmp_path: Path
) -> None:
    module = poros.streamed_model(
        folder,
        quantization="bf16_bitwise",
        lora=LoraSettings(rank=2, blocks=(0, 2)),
        numerics=FLOAT32,
        device="cpu",
    ).train()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.05)
    module.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert saved.keys() == load_file(adapter[0] / "adapter_model.safetensors").keys()
    stock = Gemma3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    stock = PeftModel.from_pretrained(stock, tmp_path)
    ids = rows().input_ids[:, :5]
    # Gemma's processors hand over token types; those of text are zeros.
    found = module(input_ids=ids, token_type_ids=torch.zeros_like(ids)).logits
    assert (found - stock(input_ids=ids).logits).abs().max() < FLOAT32_TOLERANCE
