"""`poros check`: the verdict before anything is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from poros_cli import main as cli
from poros_cli import model_check
from poros_cli.model_check import ranges


def test_a_model_that_can_be_trained_is_described(
    saved_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["check", str(saved_model)]) == 0
    out = capsys.readouterr().out
    for text in (
        "qwen2, validated (by poros-arch-qwen)",
        "(blocks 0-1)",
        "q_proj: 2 of 2 blocks",
        "Predicted peak",
    ):
        assert text in out


def test_json_holds_the_same(saved_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["check", str(saved_model), "--targets", "q_proj,v_proj", "--rank", "2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["targets"] == {"q_proj": 2, "v_proj": 2}
    assert facts["status"] == "validated"
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
    assert "Model type `gpt2` is not known to Poros" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("numbers", "text"), [([0], "0"), ([0, 1, 2], "0-2"), ([0, 2, 3, 7], "0, 2-3, 7"), ([1, 3], "1, 3")]
)
def test_block_numbers_are_shown_as_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text
