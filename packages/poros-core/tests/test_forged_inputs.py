"""Reproducers of `nox -s garbage` in the core: forged sizes, configs and adapters are refused in one message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file

from poros.checkpoint import load_adapter, load_config, read_header
from poros.errors import CheckpointError, PluginError
from poros.evidence import parse_receipts

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def header_file(folder: Path, entry: dict[str, Any], data: bytes = b"") -> Path:
    raw = json.dumps({"w": {"dtype": "U8", **entry}}).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


@pytest.mark.parametrize(
    "shape", [[0, 2**62, 2**62], [0, 2**63], [1] * 20000, [2**62] * 5000, [10**400], [2**32, 2**32, 0]]
)
def test_a_shape_that_no_tensor_can_have_is_refused(tmp_path: Path, shape: list[int]) -> None:
    path = header_file(tmp_path, {"shape": shape, "data_offsets": [0, 0]})
    with pytest.raises(CheckpointError, match=r"expected a shape of at most \d+ (non-negative|bytes)"):
        read_header(path)


def test_an_empty_tensor_is_still_read(tmp_path: Path) -> None:
    header = read_header(header_file(tmp_path, {"shape": [0, 5], "data_offsets": [0, 0]}))
    assert header.tensors["w"].shape == (0, 5)


def test_a_message_does_not_repeat_a_forged_value_in_full(tmp_path: Path) -> None:
    path = header_file(tmp_path, {"shape": ["a" * 70000], "data_offsets": [0, 0]})
    with pytest.raises(CheckpointError) as refused:
        read_header(path)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**6),
        ("head_dim", 2**36),
        ("hidden_size", 2**62),
        ("vocab_size", 10**30),
        ("num_attention_heads", 2**31),
        ("intermediate_size", 1e30),
        ("num_hidden_layers", float("nan")),
    ],
)
def test_a_size_beyond_any_model_is_refused_before_a_layer_is_built(
    tmp_path: Path, field: str, value: float, nested: bool
) -> None:
    forged = {**CONFIG, field: value}
    content = (
        {"model_type": "gemma3", "text_config": {**forged, "model_type": "gemma3_text"}} if nested else forged
    )
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"`{'text_config.' * nested}{field}` to be at most"):
        load_config(tmp_path)


def adapter_folder(folder: Path, **fields: Any) -> Path:
    LoraConfig(r=2, target_modules=["q_proj"]).save_pretrained(str(folder))
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    save_file(
        {key.format("A"): torch.ones(2, 4), key.format("B"): torch.ones(4, 2)},
        folder / "adapter_model.safetensors",
    )
    return folder


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", "2"),
        ("r", True),
        ("r", 2**63),
        ("lora_alpha", None),
        ("lora_alpha", "16"),
        ("lora_alpha", float("nan")),
        ("use_rslora", "yes"),
        ("base_model_name_or_path", ["x"]),
        ("rank_pattern", []),
        ("rank_pattern", {"q_proj": "2"}),
        ("rank_pattern", {"(": 2}),
        ("rank_pattern", {"(a+)+": 2}),
        ("rank_pattern", {".*" * 20: 2}),
        ("alpha_pattern", {"q_proj": float("inf")}),
        ("alpha_pattern", None),
    ],
)
def test_an_adapter_field_that_peft_would_fail_on_later_is_refused(
    tmp_path: Path, field: str, value: Any
) -> None:
    with pytest.raises(CheckpointError, match=rf"{field}|Cannot use an adapter"):
        load_adapter(adapter_folder(tmp_path, **{field: value}))


def test_ranks_and_alphas_by_layer_are_still_read(tmp_path: Path) -> None:
    patterns = {r"model\.layers\.0\.self_attn\.q_proj": 2, r"layers\.\d+\.mlp": 4}
    config, _ = load_adapter(adapter_folder(tmp_path, rank_pattern=patterns, alpha_pattern={"q_proj": 0.5}))
    assert config.rank_pattern == patterns


def test_a_pickle_beside_an_adapter_is_never_opened(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path)
    canary = tmp_path / "canary"
    payload = f"cos\nsystem\n(S'touch {canary}'\ntR."
    (folder / "adapter_model.bin").write_bytes(payload.encode())
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"expected adapter_config\.json and adapter_model\.safetensors"
    ):
        load_adapter(folder)
    assert not canary.exists()


@pytest.mark.parametrize(
    "raw", [b"[]", b"{", b'{"qwen2": 1}', b'{"qwen2": [1]}', b'{"qwen2": [{"name": "x"}]}', b"[" * 100000]
)
def test_a_package_s_receipts_that_are_none_are_refused(raw: bytes) -> None:
    with pytest.raises(PluginError, match="Cannot read receipts"):
        parse_receipts(raw, "qwen2", "receipts.json")
