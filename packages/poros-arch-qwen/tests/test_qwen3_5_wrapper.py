"""Qwen3.5 wrappers: the text tower is trained and saved for the text-only class, which refuses to be mistaken."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3_5VisionConfig,
)

import poros
from poros.checkpoint import load_adapter, move_adapter
from poros.errors import CheckpointError
from poros.settings import LoraSettings


def wrapper_config() -> Qwen3_5Config:
    text = Qwen3_5TextConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    vision = Qwen3_5VisionConfig(
        depth=1, hidden_size=16, intermediate_size=24, num_heads=2, patch_size=4, out_hidden_size=32
    )
    return Qwen3_5Config(text_config=text, vision_config=vision)


class Rows:
    """One row."""

    input_ids = torch.arange(1, 10)[None]
    labels = torch.arange(1, 10)[None]


class OneStep:
    """A step source of a single step."""

    num_steps, fingerprint = 1, "one"

    def step(self, index: int) -> list[Rows]:
        return [Rows()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random wrapper checkpoint in bfloat16, with a tensor of the multi-token head."""
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("qwen3_5")
    Qwen3_5ForConditionalGeneration(wrapper_config()).to(torch.bfloat16).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "mtp.fc.weight": torch.ones(2, 2)}, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The result of one step on the wrapper, and the run's fingerprint."""
    output = tmp_path_factory.mktemp("run")
    opened = poros.open_model(folder, lora=LoraSettings(rank=2))
    settings = poros.RunSettings(output=output, device="cpu")
    with poros.Trainer(opened, OneStep(), settings) as trainer:  # type: ignore[arg-type]
        return trainer.run(), trainer.fingerprint


def test_the_adapter_is_saved_for_the_text_only_class(trained: tuple[Any, Any]) -> None:
    report = trained[0].adapter_report
    assert (report.base_class, report.blocks) == ("Qwen3_5ForCausalLM", "model.layers")
    _, tensors = load_adapter(trained[0].adapter)
    assert len(tensors) == 2 * (3 * 8 + 7)
    assert not [name for name in tensors if "visual" in name]


def test_the_kernels_are_part_of_the_resume_fingerprint(trained: tuple[Any, Any]) -> None:
    assert trained[1]["kernels.chunk_gated_delta_rule"]


def test_stock_peft_loads_it_onto_what_auto_gives(trained: tuple[Any, Any]) -> None:
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_config(wrapper_config()), trained[0].adapter)
    _, tensors = load_adapter(trained[0].adapter)
    loaded = dict(model.named_parameters())
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name.replace(".weight", ".default.weight")].data, tensor)


def test_the_wrapper_s_own_class_refuses_it_by_the_path_and_takes_a_moved_one(
    trained: tuple[Any, Any], tmp_path: Path
) -> None:
    base = Qwen3_5ForConditionalGeneration(wrapper_config())
    with pytest.raises(ValueError, match=re.escape(r"model\.layers")):
        PeftModel.from_pretrained(base, trained[0].adapter)
    new = "model.language_model.layers"
    moved = move_adapter(trained[0].adapter, tmp_path / "moved", old="model.layers", new=new)
    PeftModel.from_pretrained(Qwen3_5ForConditionalGeneration(wrapper_config()), moved)


def test_moving_from_another_path_than_its_own_is_refused(trained: tuple[Any, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Cannot move an adapter"):
        move_adapter(trained[0].adapter, tmp_path / "moved", old="model.text.layers", new="model.layers")


Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def drop(ending: str) -> Change:
    return lambda tensors: {n: t for n, t in tensors.items() if not n.endswith(ending)}


def add(name: str) -> Change:
    return lambda tensors: {**tensors, name: torch.ones(2)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("layers.0.linear_attn.A_log"), r"1 missing: `[^`]*layers\.0\.linear_attn\.A_log`"),
        (drop("lm_head.weight"), r"1 missing: `lm_head\.weight`"),
        (add("model.language_model.layers.0.extra"), r"unknown tensors.*layers\.0\.extra"),
    ],
    ids=["missing plain tensor", "missing head", "unknown text tensor"],
)
def test_text_tensors_must_all_be_there_and_known(
    change: Change, message: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(change(load_file(folder / "model.safetensors")), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        poros.open_model(tmp_path)
