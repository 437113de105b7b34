"""Adapters in PEFT's format, read back by stock PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import safe_open
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from poros.checkpoint import load_adapter, save_adapter, verify_adapter
from poros.errors import CheckpointError, NonFiniteError, OutputError

TARGETS = ("q_proj", "v_proj", "down_proj")


def config() -> Qwen2Config:
    return Qwen2Config(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )


def base() -> nn.Module:
    with torch.device("meta"):
        return Qwen2ForCausalLM(config())


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**({"r": 2, "target_modules": list(TARGETS), "task_type": "CAUSAL_LM"} | options))


def tensors_for(lora_config: LoraConfig) -> dict[str, torch.Tensor]:
    """Return random tensors under the keys and shapes that PEFT itself would save."""
    torch.manual_seed(0)
    model = get_peft_model(Qwen2ForCausalLM(config()), lora_config)
    return {name: torch.randn_like(tensor) for name, tensor in get_peft_model_state_dict(model).items()}


def saved(folder: Path, lora_config: LoraConfig | None = None, **changes: torch.Tensor) -> Path:
    lora_config = lora_config or lora()
    return save_adapter(folder, tensors_for(lora_config) | changes, lora_config, "org/base")


def test_stock_peft_reads_the_files_and_computes_the_same(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Qwen2ForCausalLM(config()).eval()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lora_config = lora()
    ours = tensors_for(lora_config)
    save_adapter(tmp_path / "adapter", ours, lora_config, "org/base")
    loaded = PeftModel.from_pretrained(model, str(tmp_path / "adapter"))
    back = get_peft_model_state_dict(loaded, save_embedding_layers=False)  # "auto" asks the network
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], ours[name]) for name in ours)
    plain = Qwen2ForCausalLM(config()).eval()
    plain.load_state_dict(weights)
    ids = torch.arange(5)[None]
    assert not torch.equal(loaded(ids).logits, plain(ids).logits)


def test_the_files_are_those_that_peft_writes(tmp_path: Path) -> None:
    folder = saved(tmp_path / "adapter")
    content = json.loads((folder / "adapter_config.json").read_text())
    assert content["inference_mode"] is True
    assert content["base_model_name_or_path"] == "org/base"
    assert content["target_modules"] == sorted(TARGETS)  # a set's order would change from process to process
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in file.keys()  # noqa: SIM118
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
    ]


def test_the_callers_config_is_not_changed(tmp_path: Path) -> None:
    lora_config = lora()
    before = lora_config.to_dict()
    save_adapter(tmp_path / "a", tensors_for(lora_config), lora_config, "org/base")
    assert lora_config.to_dict() == before
    assert isinstance(lora_config.target_modules, set)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"layers_to_transform": [1]},
        {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 3}},
        {"target_modules": r"model\.layers\.[02]\..*\.q_proj"},
    ],
)
def test_verification_counts_modules_and_bytes(tmp_path: Path, options: dict[str, Any]) -> None:
    lora_config = lora(**options)
    folder = saved(tmp_path / "adapter", lora_config)
    report = verify_adapter(folder, base)
    expected = len(tensors_for(lora_config))
    assert report.base_class == "Qwen2ForCausalLM"
    assert report.num_tensors == expected == 2 * report.num_modules
    assert report.num_bytes == (folder / "adapter_model.safetensors").stat().st_size


def test_a_dry_save_before_the_first_step_may_have_zero_b(tmp_path: Path) -> None:
    lora_config = lora()
    zero = {n: t.zero_() if "lora_B" in n else t for n, t in tensors_for(lora_config).items()}
    folder = save_adapter(tmp_path / "adapter", zero, lora_config, "org/base")
    verify_adapter(folder, base, require_nonzero=False)
    with pytest.raises(CheckpointError, match=r"no effect"):
        verify_adapter(folder, base)


def test_an_existing_adapter_is_replaced_only_when_asked(tmp_path: Path) -> None:
    folder = saved(tmp_path / "adapter")
    with pytest.raises(OutputError, match=r"one that exists"):
        saved(folder)
    save_adapter(folder, tensors_for(lora()), lora(), "org/other", overwrite=True)
    assert load_adapter(folder)[0].base_model_name_or_path == "org/other"


def test_load_gives_back_config_and_tensors(tmp_path: Path) -> None:
    lora_config = lora(use_rslora=True)
    folder = saved(tmp_path / "adapter", lora_config)
    loaded_config, loaded = load_adapter(folder)
    assert (loaded_config.r, loaded_config.use_rslora) == (2, True)
    expected = tensors_for(lora_config)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_load_reads_what_peft_saved(tmp_path: Path) -> None:
    get_peft_model(Qwen2ForCausalLM(config()), lora()).save_pretrained(str(tmp_path / "peft"))
    assert len(load_adapter(tmp_path / "peft")[1]) == 18
    assert verify_adapter(tmp_path / "peft", base, require_nonzero=False).num_modules == 9


def test_keys_of_another_class_are_refused_with_the_class_named(tmp_path: Path) -> None:
    renamed = {n.replace("model.layers", "language_model.layers"): t for n, t in tensors_for(lora()).items()}
    folder = save_adapter(tmp_path / "adapter", renamed, lora(), "org/base")
    with pytest.raises(CheckpointError, match=r"18 missing.*18 unexpected.*Qwen2ForCausalLM"):
        verify_adapter(folder, base)


def test_a_lost_module_is_refused(tmp_path: Path) -> None:
    part = {n: t for n, t in tensors_for(lora()).items() if "layers.2.mlp" not in n}
    folder = save_adapter(tmp_path / "adapter", part, lora(), "org/base")
    with pytest.raises(CheckpointError, match=r"2 missing"):
        verify_adapter(folder, base)


def test_shapes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "adapter", tensors_for(lora(r=4)), lora(r=2), "org/base")
    with pytest.raises(CheckpointError, match=r"size mismatch"):
        verify_adapter(folder, base)


def test_targets_that_match_nothing_are_refused(tmp_path: Path) -> None:
    folder = save_adapter(
        tmp_path / "adapter", tensors_for(lora()), lora(target_modules=["nope_proj"]), "org/base"
    )
    with pytest.raises(CheckpointError, match=r"nope_proj"):
        verify_adapter(folder, base)


@pytest.mark.parametrize(
    "key",
    [
        "base_model.model.lm_head.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
    ],
)
def test_only_lora_keys_are_written(tmp_path: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match=r"Not a LoRA weight"):
        saved(tmp_path / "adapter", None, **{key: torch.ones(2, 8)})
    assert not (tmp_path / "adapter").exists()


def test_an_empty_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"Empty adapter"):
        save_adapter(tmp_path / "adapter", {}, lora(), "org/base")


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.ones(2, 8), None, "Incomplete adapter pair"),
        (torch.ones(2, 8), torch.ones(16), "Incomplete adapter pair"),
        (torch.ones(2, 8), torch.ones(0, 2), "Incomplete adapter pair"),
        (torch.ones(2, 8), torch.ones(8, 3), "one rank"),
    ],
)
def test_half_a_pair_or_one_that_does_not_fit_is_refused(
    tmp_path: Path, a: torch.Tensor, b: torch.Tensor | None, message: str
) -> None:
    pair = {"base_model.model.x.lora_A.weight": a}
    if b is not None:
        pair["base_model.model.x.lora_B.weight"] = b
    with pytest.raises(CheckpointError, match=message):
        save_adapter(tmp_path / "adapter", pair, lora(), "org/base")


def test_a_nan_is_refused_by_name_and_keeps_the_earlier_adapter(tmp_path: Path) -> None:
    folder = saved(tmp_path / "adapter")
    tensors = tensors_for(lora())
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    tensors[name][0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"q_proj.lora_B.weight"):
        save_adapter(folder, tensors, lora(), "org/base", overwrite=True)
    verify_adapter(folder, base)


def test_a_truncated_adapter_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "adapter")
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"adapter_model"):
        verify_adapter(folder, base)
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"4 bytes are missing"):
        load_adapter(folder)


def test_a_folder_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no such folder"):
        load_adapter(tmp_path / "none")
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin"):
        load_adapter(tmp_path)


def test_an_adapter_of_another_kind_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "adapter")
    (folder / "manifest.json").unlink()
    (folder / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(CheckpointError, match=r"IA3"):
        load_adapter(folder)


def test_equal_adapters_are_equal_files_in_every_process(tmp_path: Path) -> None:
    made_for = {"base_class": "Qwen2ForCausalLM", "blocks": "model.layers"}
    save_adapter(tmp_path / "a", tensors_for(lora()), lora(), "org/base", made_for=made_for)
    content = (tmp_path / "a" / "adapter_model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    # The library shuffles it anew in every process.
    assert list(header["__metadata__"]) == ["base_class", "blocks", "format"]
    assert header["__metadata__"]["format"] == "pt"
