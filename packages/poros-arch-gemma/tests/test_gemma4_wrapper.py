"""Gemma 4 wrappers: the text tower is trained; the vision tower, whose linears PEFT does not know, is left alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import Gemma4Config, Gemma4ForConditionalGeneration, Gemma4VisionConfig

import poros
from poros.checkpoint import load_adapter
from poros.errors import CheckpointError, ConfigError
from poros.run import describe_model
from poros.settings import LoraSettings, Numerics, Plan
from poros_arch_gemma.gemma4_cases import gemma4_shared

VOCABULARY = 131
# Two implementations of one float32 forward on x86-64 stay below 1e-6; the contract's bound.
FLOAT32_TOLERANCE = 1e-5
FLOAT32 = Numerics(compute_dtype=torch.float32, length_bucket=4)


def wrapper_config() -> Gemma4Config:
    vision = Gemma4VisionConfig(
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        patch_size=4,
        position_embedding_size=16,
    )
    return Gemma4Config(text_config=gemma4_shared(tie_word_embeddings=True), vision_config=vision)


@dataclass
class Rows:
    """One row, longer than the window."""

    input_ids: torch.Tensor
    labels: torch.Tensor


def rows() -> Rows:
    ids = torch.randint(1, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(3))
    return Rows(ids, ids)


class OneStep:
    """A step source of a single step."""

    num_steps, fingerprint = 1, "one"

    def step(self, index: int) -> list[Rows]:
        return [rows()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random wrapper checkpoint in bfloat16, with the tensors of sharing blocks that published files repeat."""
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("gemma4")
    Gemma4ForConditionalGeneration(wrapper_config()).to(torch.bfloat16).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    own = {name: tensor for name, tensor in tensors.items() if "language_model.layers.0.self_attn.k_" in name}
    assert len(own) == 2
    tensors |= {name.replace(".layers.0.", ".layers.3."): tensor.clone() for name, tensor in own.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.filterwarnings("ignore:EXPERIMENTAL")
def test_the_loss_is_that_of_the_wrapper_in_training(folder: Path) -> None:
    batch = rows()
    theirs = Gemma4ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).train()
    types = torch.zeros_like(batch.input_ids)
    with torch.no_grad():
        logits = theirs(input_ids=batch.input_ids, mm_token_type_ids=types, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, VOCABULARY), batch.labels[:, 1:].reshape(-1)
    )
    engine = poros.open_model(folder, quantization="bf16_bitwise", numerics=FLOAT32).load(
        plan=Plan(num_slots=2), device=torch.device("cpu"), seed=1
    )
    total, count = engine.evaluate([batch])
    engine.close()
    assert total / count == pytest.approx(loss.item(), abs=FLOAT32_TOLERANCE)


def test_a_missing_tensor_in_front_of_the_blocks_is_fatal(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if n.endswith("per_layer_model_projection.weight"))
    tensors[f"{name}_renamed"] = tensors.pop(name)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing: `[^`]*per_layer_model_projection\.weight`"):
        poros.open_model(tmp_path)


def test_the_adapter_loads_onto_the_wrapper_without_touching_its_tower(folder: Path, tmp_path: Path) -> None:
    """Leaf names would reach the tower's clipped linears, which stock PEFT refuses to adapt."""
    opened = poros.open_model(folder, lora=LoraSettings(rank=2, blocks=(2, 5)))
    settings = poros.RunSettings(output=tmp_path, device="cpu")
    with poros.Trainer(opened, OneStep(), settings) as trainer:  # type: ignore[arg-type]
        result = trainer.run()
    assert result.adapter is not None
    base = Gemma4ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, result.adapter)
    _, tensors = load_adapter(result.adapter)
    # Block 2 has all seven, block 5 reads another block's keys and values.
    assert len(tensors) == 2 * (7 + 5)
    adapted = [name for name, _ in loaded.named_parameters() if "lora_" in name]
    assert len(adapted) == len(tensors)
    assert not [name for name in adapted if "language_model" not in name]


def test_a_target_that_reaches_the_tower_is_refused_with_the_path() -> None:
    lora = LoraSettings(rank=2, targets=(r".*vision_tower.*q_proj.*",))
    with pytest.raises(ConfigError, match=r"reaches outside the text model.*vision_tower.*q_proj"):
        describe_model(wrapper_config(), lora=lora)
