"""What is in effect is shown, and what config.json states otherwise is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from poros.checkpoint import load_config
from poros.effective_config import EffectiveConfig, config_notes, effective_config
from poros.interfaces import Architecture, ModelParts
from poros.plugins import Registry

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
}
QWEN2 = {"model_type": "qwen2", **SIZES}
GEMMA3 = {"model_type": "gemma3_text", "head_dim": 16, **SIZES}


class ByConfig:
    """Layer types as the text config lists them."""

    @staticmethod
    def layer_type(config: Any, index: int) -> str:
        return str(config.layer_types[index])


def read(folder: Path, raw: dict[str, Any]) -> tuple[EffectiveConfig, tuple[str, ...]]:
    (folder / "config.json").write_text(json.dumps(raw))
    config = load_config(folder)
    architecture: Architecture = ByConfig()  # type: ignore[assignment]
    parts = ModelParts(
        blocks="b",
        embedding="e",
        final_norm="n",
        head="h",
        tied=bool(config.get_text_config().tie_word_embeddings),
    )
    effective = effective_config(config, architecture, parts)
    return effective, config_notes(raw, config, effective)


def test_rotary_bases_and_windows_are_per_layer_type(tmp_path: Path) -> None:
    raw = {**GEMMA3, "rope_theta": 5e5, "rope_local_base_freq": 2e4, "sliding_window": 512}
    effective, notes = read(tmp_path, raw)
    assert effective.rotary == {
        "full_attention": (5e5, "default"),
        "sliding_attention": (2e4, "default"),
    }
    assert effective.windows == ((512, (0, 1, 2, 3, 4)), (None, (5,)))
    assert effective.tied
    assert notes == ()


def test_old_names_that_reach_a_field_are_no_difference(tmp_path: Path) -> None:
    raw = {**QWEN2, "rope_theta": 1e6, "torch_dtype": "bfloat16", "tie_word_embeddings": True}
    effective, notes = read(tmp_path, raw)
    assert effective.rotary == {"full_attention": (1e6, "default")}
    assert notes == ()


DIFFERENCES = {
    "rope_theta": (
        {**QWEN2, "rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        "config.json states `rope_theta` 1,000,000; the rotary base in effect is 500,000 (full_attention).",
    ),
    "a local base": (
        {
            **GEMMA3,
            "rope_local_base_freq": 7,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            },
        },
        "config.json states `rope_local_base_freq` 7; the rotary base in effect is 1,000,000 (full_attention), "
        "10,000 (sliding_attention).",
    ),
    "rope_parameters": (
        {
            **QWEN2,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
        "config.json states `rope_parameters.rope_theta` 500,000; the rotary base in effect is 10,000",
    ),
    "a window that is off": (
        {**QWEN2, "use_sliding_window": False, "sliding_window": 4096},
        "config.json states `sliding_window` 4096; in effect is None.",
    ),
    "an unknown key": (
        {**QWEN2, "use_mrope": False, "rms_norm_epsilon": 1e-3},
        "config.json states keys that Qwen2Config does not declare: `rms_norm_epsilon`, `use_mrope`.",
    ),
    "a wrapper's tie": (
        {"model_type": "gemma3", "tie_word_embeddings": False, "vision_config": {}, "text_config": GEMMA3},
        "config.json states `tie_word_embeddings` false; in effect the head is tied to the embedding.",
    ),
    "a wrapper": (
        {"model_type": "gemma3", "vision_config": {}, "text_config": GEMMA3},
        "`gemma3` is a multimodal wrapper: its text tower `gemma3_text` is trained, vision is not loaded.",
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_value_that_is_not_in_effect_is_said_in_one_line(name: str, tmp_path: Path) -> None:
    raw, text = DIFFERENCES[name]
    _, notes = read(tmp_path, raw)
    assert [note for note in notes if text in note], notes


def test_the_gate_s_own_architectures_are_read(tmp_path: Path, registry: Registry) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    config = load_config(tmp_path)
    architecture = registry.architectures["qwen2"].value()
    effective = effective_config(config, architecture, architecture.parts(config))
    assert effective.windows == ((None, (0, 1, 2, 3, 4, 5)),)
    assert not effective.tied
