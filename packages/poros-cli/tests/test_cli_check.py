"""`poros check`: the verdict before anything is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from poros_cli import main as cli
from poros_cli import model_check


def test_a_model_that_can_be_trained_is_described(
    saved_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["check", str(saved_model)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for text in (
        "qwen2, validated (by poros-arch-qwen)",
        "(blocks 0-1)",
        "NVIDIA H200, torch 2.11.0: residency of qwen2.5-32b (nf4)",
        "this platform",
        "full_attention 10,000 (default)",
        "all tokens in blocks 0-1",
        "its own matrix",
        "q_proj: 2 of 2 blocks",
        "Predicted peak",
    ):
        assert text in out


def test_json_holds_the_same(saved_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["check", str(saved_model), "--targets", "q_proj,v_proj", "--rank", "2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["targets"] == {"q_proj": 2, "v_proj": 2}
    assert facts["status"] == "validated"
    assert {receipt["claim"] for receipt in facts["receipts"]} == {"residency", "reference"}
    assert "this platform" in facts["platform"]
    assert facts["rotary_base"] == {"full_attention": 10000.0}
    assert facts["attention_windows"] == [{"tokens": None, "blocks": [0, 1]}]
    assert facts["tied_head"] is False
    assert facts["weights_checked"] is True
    assert facts["block_kinds"][0]["blocks"] == [0, 1]
    assert facts["adapter_parameters"] == 2 * (2 * (32 + 32) + 2 * (32 + 16))
    planned, resident = facts["predicted"]["planned"], facts["predicted"]["resident"]
    assert "slots" in planned["device_terms_bytes"]
    assert "resident blocks" in resident["device_terms_bytes"]
    assert planned["device_bytes"] == sum(planned["device_terms_bytes"].values())


def test_a_config_alone_is_enough(
    saved_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(saved_model / "config.json", tmp_path)
    assert cli.run(["check", str(tmp_path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["weights_checked"] is False
    assert "Only `config.json` was looked at" in facts["notes"][0]


def test_longer_rows_need_more(saved_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peaks = []
    for length in ("512", "4096"):
        assert cli.run(["check", str(saved_model), "--max-length", length, "--json"]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["predicted"]["planned"]["device_bytes"])
    assert peaks[0] < peaks[1]


def test_an_unsupported_model_type_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({**config, "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]})
    )
    assert cli.run(["check", str(model)]) == 2
    assert "Refused: Model type `gpt2` is not known to Poros" in capsys.readouterr().err


REFUSED = {
    "unknown to both": (
        {"model_type": "qwen9"},
        "Refused: Unknown model type: expected a type that the installed",
    ),
    "experts": (
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2},
        "Refused: Model type `qwen3_moe` is a mixture of experts",
    ),
    "a feature": (
        {"is_causal": False},
        "Refused: Unsupported feature inside `qwen2`: expected causal attention",
    ),
    "code": ({"auto_map": {"AutoModel": "x.Y"}}, "Refused: This model computes with code that ships with it"),
    "quantized": ({"quantization_config": {"quant_method": "awq"}}, "got weights quantized with awq"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_each_cause_of_a_refusal_has_its_own_text(
    name: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, text = REFUSED[name]
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **change}))
    assert cli.run(["check", str(model)]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert "Traceback" not in err


def test_the_smallest_config_of_a_mixture_of_experts_is_refused_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert cli.run(["check", str(tmp_path)]) == 2
    assert "is a mixture of experts" in capsys.readouterr().err


@pytest.mark.parametrize("tied", [True, False])
def test_lora_on_the_head_is_refused_for_tied_and_untied_heads(
    tied: bool, saved_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((saved_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
    assert cli.run(["check", str(tmp_path), "--targets", "lm_head"]) == 2
    assert "LoRA on the vocabulary matrices is not offered" in capsys.readouterr().err


def test_a_value_in_the_file_that_is_not_in_effect_is_noted(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0, "made_up": 3}))
    assert cli.run(["check", str(model), "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert "config.json states `rope_theta` 5; the rotary base in effect is 10,000 (full_attention)." in notes
    assert any("does not declare: `made_up`" in note for note in notes)


def test_a_truncated_shard_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = sorted(model.glob("model-*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-10])
    assert cli.run(["check", str(model)]) == 2
    assert shard.name in capsys.readouterr().err


def test_of_a_hub_model_only_the_config_is_fetched(
    saved_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(saved_model / "config.json", tmp_path / "config.json")
    asked: list[tuple[str, bool]] = []

    def resolve(model: str, *, config_only: bool) -> Path:
        asked.append((model, config_only))
        return tmp_path

    monkeypatch.setattr(model_check, "resolve_model", resolve)
    assert cli.run(["check", "owner/model", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert asked == [("owner/model", True)]
    assert facts["weights_checked"] is False
    assert "Only `config.json` was looked at" in facts["notes"][0]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for assumed rates, whatever this machine has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_budget_is_planned_for_and_the_plan_explained(
    saved_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(saved_model / "config.json", tmp_path)
    arguments = ["check", str(tmp_path), "--vram", "2GB", "--seq-len", "256", "--micro-batches", "4"]
    assert cli.run(arguments) == 0
    out = " ".join(capsys.readouterr().out.split())
    for text in (
        "Plan for 4 x 1 x 256 tokens a step, times at assumed rates",
        "2.00 GB (the `vram` budget)",
        "predicted step",
        "binding resource",
        "one more GB buys",
        "best micro-batch size",
        "ASSUMED: what was measured on one H200",
    ):
        assert text in out
    assert cli.run([*arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["max_length"] == 256
    assert facts["predicted"]["planned"]["device_bytes"] <= 2 * 10**9
    assert facts["predicted_step"]["seconds"] > 0
    assert set(facts["one_more_gb"]) == {"device_bytes", "step_seconds", "saved_seconds"}
    assert facts["recommended"]["micro_batch_size"] * facts["recommended"]["micro_batches"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--vram", "100MB"), "device memory for the smallest plan: expected at least `--vram "),
        (
            ("--vram", "2GB", "--ram", "1MB", "--seq-len", "8192"),
            "host memory for the smallest plan: expected at least `--ram ",
        ),
        (("--vram", "8"), "`vram`: expected a size: 8GB"),
        (("--ram", "plenty"), "`ram`: expected a size: 8GB"),
    ],
)
def test_a_budget_that_cannot_work_is_refused(
    saved_model: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert cli.run(["check", str(saved_model), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_pinned_slots_are_planned_with(saved_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["check", str(saved_model), "--slots", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["num_slots"] == 5


HYBRID = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
WRAPPER = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 4, "hidden_size": 64},
    "vision_config": {"model_type": "siglip_vision_model"},
}


def checked(folder: Path, config: dict[str, object], capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    assert cli.run(["check", str(folder), "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_targets_that_miss_blocks_are_counted_and_the_bare_blocks_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = checked(tmp_path, HYBRID, capsys, "--targets", "q_proj,v_proj")
    assert facts["targets"] == {"q_proj": 1, "v_proj": 1}
    assert "3 of 4 blocks get no adapter: no target matches in blocks 0-2." in facts["notes"]


def test_default_targets_reach_every_block_of_a_hybrid_and_its_kernels_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = checked(tmp_path, HYBRID, capsys)
    assert (facts["targets"]["in_proj_qkv"], facts["targets"]["q_proj"]) == (3, 1)
    assert facts["targets"]["gate_proj"] == 4
    assert not [note for note in facts["notes"] if "get no adapter" in note]
    assert set(facts["kernels"]) == {"chunk_gated_delta_rule", "causal_conv1d"}


def test_of_a_wrapper_the_text_tower_is_trained_with_its_class_s_own_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = checked(tmp_path, WRAPPER, capsys)
    assert (facts["architecture"], facts["num_blocks"]) == ("gemma3", 4)
    assert any("its text tower `gemma3_text` is trained, vision is not loaded" in n for n in facts["notes"])
    assert facts["tied_head"] is True
