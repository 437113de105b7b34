"""Bad input to `poros train`: one clear message, exit code 2, no traceback, nothing lost."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from poros_cli.main import run


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        if value is None:
            config.pop(name)
        else:
            config[name] = value
    path.write_text(json.dumps(config))


def shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[0]


def index_edit(folder: Path, edit: Callable[[dict[str, str]], None]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def swap_first_two(weight_map: dict[str, str]) -> None:
    first, *_, last = weight_map
    weight_map[first], weight_map[last] = weight_map[last], weight_map[first]


def truncate(folder: Path) -> None:
    path = shard(folder)
    path.write_bytes(path.read_bytes()[:-100])


MODELS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing folder": (shutil.rmtree, "no such folder.*nothing was looked up on the network"),
    "unsupported type": (lambda f: edit_config(f, model_type="gpt2"), "`gpt2`.*expected one of"),
    "unknown type": (lambda f: edit_config(f, model_type="qwen9"), "qwen9"),
    "mixture of experts": (
        lambda f: edit_config(f, model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2),
        "mixture of experts",
    ),
    "truncated shard": (truncate, "100 bytes"),
    "LFS pointer": (
        lambda f: shard(f).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        "[Gg]it.LFS",
    ),
    "HTML page": (lambda f: shard(f).write_text("<!DOCTYPE html><html>error</html>"), "HTML"),
    "index names a missing shard": (lambda f: shard(f).unlink(), "shard is missing.*00001"),
    "tensor missing from its shard": (lambda f: index_edit(f, swap_first_two), "absent from its shard"),
    "config without a field": (lambda f: edit_config(f, num_hidden_layers=None), "num_hidden_layers"),
    "config of another model": (lambda f: edit_config(f, intermediate_size=64), "does not fit its config"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "no tokenizer": (
        lambda f: [path.unlink() for path in f.glob("tokenizer*")],
        "Cannot load the model's tokenizer",
    ),
    "no weights": (lambda f: [path.unlink() for path in f.glob("model*")], "expected `model.safetensors`"),
}

DATA: dict[str, tuple[str, str]] = {
    "empty file": ("", "rows.jsonl"),
    "bad JSON": ('{"text": "a"}\n{"text": "b",}\n', r"rows\.jsonl:2:\d+"),
    "unknown schema": ('{"instruction": "Add", "response": "3"}\n', "response.*output"),
    "no supervised token": (
        '{"messages": [{"role": "user", "content": "alone"}]}\n',
        "expected at least one supervised token",
    ),
}

FLAGS: dict[str, tuple[tuple[str, ...], str]] = {
    "unknown quantization": (("--quantization", "nf5"), "Did you mean `nf4`"),
    "int8": (("--quantization", "int8"), "not offered: .*outlier"),
    "unmatched target": (("--targets", "nope_proj"), "down_proj.*q_proj.*got `nope_proj`"),
    "head as target": (("--targets", "lm_head"), "not offered"),
    "no CUDA": (("--device", "cuda"), "expected a CUDA device"),
    "unknown setting": (("--set", "lora.rnak=3"), "Did you mean `lora.rank`"),
    "block that does not exist": (("--set", "lora.blocks=[7]"), "expected 0 to 1"),
    "resume of nothing": (("--resume",), "expected a complete checkpoint"),
    "resume and overwrite": (("--resume", "--overwrite"), "at most one of them"),
}


def refused(
    capsys: pytest.CaptureFixture[str], message: str, model: Path, rows: Path, output: Path, *more: str
) -> None:
    arguments = ["--model", str(model), "--data", str(rows), "--output", str(output)]
    assert run(["train", *arguments, *(more if "--device" in more else ("--device", "cpu", *more))]) == 2
    shown = capsys.readouterr()
    assert re.search(message, shown.err, re.DOTALL), shown.err
    assert shown.err.startswith(("Error: ", "Refused: "))
    assert shown.err.count("\n") == 1
    assert "Traceback" not in shown.out + shown.err
    assert not output.exists() or not any(output.iterdir())


@pytest.fixture(autouse=True)
def _no_debug_and_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POROS_DEBUG", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def no_network(*_: Any, **__: Any) -> None:
        raise AssertionError("looked something up on the network")

    monkeypatch.setattr("socket.socket.connect", no_network)


@pytest.mark.parametrize(("damage", "message"), MODELS.values(), ids=MODELS.keys())
def test_a_bad_model(
    damage: Callable[[Path], Any],
    message: str,
    model: Path,
    rows: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(model)
    refused(capsys, message, model, rows, tmp_path / "out")


@pytest.mark.parametrize(("text", "message"), DATA.values(), ids=DATA.keys())
def test_bad_rows(
    text: str, message: str, model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows.write_text(text)
    refused(capsys, message, model, rows, tmp_path / "out")


@pytest.mark.parametrize(("flags", "message"), FLAGS.values(), ids=FLAGS.keys())
def test_bad_settings(
    flags: tuple[str, ...],
    message: str,
    model: Path,
    rows: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    refused(capsys, message, model, rows, tmp_path / "out", *flags)


def test_a_launcher_with_several_processes(
    model: Path,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(capsys, "`WORLD_SIZE` is 2", model, rows, tmp_path / "out")


def test_a_used_output_folder_keeps_everything(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "thesis.txt").write_text("mine")
    arguments = ["--model", str(model), "--data", str(rows), "--output", str(output), "--device", "cpu"]
    assert run(["train", *arguments]) == 2
    assert "`--resume`, replace it with `--overwrite`" in capsys.readouterr().err
    assert [path.name for path in output.iterdir()] == ["thesis.txt"]


def test_overwrite_loses_nothing_when_the_new_run_is_refused(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(model), "--data", str(rows), "--output", str(tmp_path / "out")]
    assert run(["train", *arguments, "--device", "cpu", "--max-steps", "1"]) == 0
    before = sorted((tmp_path / "out").rglob("*"))
    truncate(model)
    assert run(["train", *arguments, "--device", "cpu", "--overwrite"]) == 2
    assert sorted((tmp_path / "out").rglob("*")) == before


def test_a_tokenizer_with_more_tokens_than_the_model(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["Number"])
    tokenizer.save_pretrained(model)
    refused(capsys, "token ids below 258", model, rows, tmp_path / "out")
