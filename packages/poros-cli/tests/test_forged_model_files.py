"""Reproducers of `nox -s garbage` in the command line: forged tokenizer files, YAML and records of runs."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from poros.errors import CheckpointError, ConfigError
from poros_cli.config_file import resolve_config
from poros_cli.main import run
from poros_cli.tokenizer import load_tokenizer, stop_token_ids

NEEDED = "model: m\ndata: d\noutput: o\n"


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("value", ["many", [1], {"a": 1}])
def test_a_longest_length_that_is_no_number_is_refused(model: Path, value: object) -> None:
    edit(model / "tokenizer_config.json", model_max_length=value)
    with pytest.raises(CheckpointError, match="`model_max_length` of"):
        load_tokenizer(model)


def test_a_tokenizer_s_own_code_is_never_run(model: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (model / "own.py").write_text(f"open({str(canary)!r}, 'w')\n")
    edit(
        model / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["own.Own", "own.Own"]},
        tokenizer_class="Own",
    )
    with contextlib.suppress(CheckpointError):  # refused, or read without that code: both are fine
        load_tokenizer(model)
    assert not canary.exists()


def test_a_tokenizer_file_that_is_a_link_to_elsewhere_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").rename(tmp_path / "elsewhere.json")
    (model / "tokenizer.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(CheckpointError, match="A link leaves its folder"):
        load_tokenizer(model)


@pytest.mark.parametrize("text", ["[" * 100000, '{"eos_token_id": [-1, true, 1e9, "x"]}', "[]"])
def test_stop_tokens_of_a_damaged_file_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    assert stop_token_ids(tmp_path) == ()


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * 5000,
        "a: " + "{b: " * 5000,
        'a: "\\U00110000"',
        "seed: " + "9" * 5000,
        "report_to: &a [*a]",
        "&a ? *a : *a",
        "seed: !!python/object/apply:os.system [touch canary]",
        "lora: !!python/name:os.system",
        "%YAML 9999999.1\n---\na: 1",
    ],
)
def test_yaml_that_would_exhaust_or_execute_something_is_refused(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(f"{text}\n" if text.startswith("%") else f"{NEEDED}{text}\n")
    with pytest.raises(ConfigError):
        resolve_config(tmp_path / "run.yaml")
    assert not (tmp_path / "canary").exists()


def test_a_billion_laughs_are_refused_without_being_expanded(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    (tmp_path / "run.yaml").write_text(NEEDED + "\n".join(lines) + "\nreport_to: *a29\n")
    with pytest.raises(ConfigError):
        resolve_config(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    "changes",
    [
        {"plan": {"num_slots": "x"}, "num_blocks": "y"},
        {"predicted_device_bytes": {"a": "b"}},
        {"predicted_timeline": {"passes": []}},
        {"rates": {"origin": 1, "link_bytes_per_second": "fast"}},
        {"budget": {"device_bytes": []}},
        {"model": {"receipts": 3, "status": "validated"}},
    ],
)
def test_a_forged_record_of_a_run_gives_a_page_or_one_message(
    tmp_path: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    record: dict[str, Any] = {"fingerprint": {}, "model": {}, "plan": {}, "settings": {}, **changes}
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert run(["report", str(tmp_path)]) in (0, 2)
    assert "Unexpected error" not in capsys.readouterr().err
