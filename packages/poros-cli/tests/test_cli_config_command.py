"""`poros config init` and `poros config show`."""

from __future__ import annotations

from pathlib import Path

import pytest

from poros_cli.config_file import load_config
from poros_cli.main import run


@pytest.fixture
def poros(capsys: pytest.CaptureFixture[str]) -> object:
    def call(*arguments: object, code: int = 0) -> str:
        assert run([str(argument) for argument in arguments]) == code
        captured = capsys.readouterr()
        return captured.out + captured.err

    return call


def test_init_writes_a_config_that_loads_with_what_was_given(poros, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    said = poros("config", "init", file, "--model", r"./my: mod\1el", "--data", "a b.jsonl")
    assert f"poros train {file}" in said
    config = load_config(file)
    assert (config.model, config.data, config.output) == (r"./my: mod\1el", "a b.jsonl", "runs/first")
    assert "# training rows" in file.read_text()


def test_init_overwrites_nothing(poros, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("mine")
    assert "got a file that is there already" in poros("config", "init", file, code=2)
    assert file.read_text() == "mine"
    assert "No such file" in poros("config", "init", tmp_path / "none" / "run.yaml", code=2)


def test_show_names_where_every_value_came_from(poros, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ndata: [a.jsonl, b.jsonl]\noutput: o\nlora: {rank: 4}\nseed: 1\n")
    shown = poros("config", "show", file, "--set", "lora.alpha=8", "--seed", 3)
    found = {line.split(":")[0].strip(): line for line in shown.splitlines()}
    assert found["model"].endswith(f"# {file}:1:1")
    assert found["rank"].startswith("  rank: 4 ")
    assert found["rank"].endswith(f"# {file}:4:8")
    assert found["alpha"].endswith("# --set lora.alpha=8")
    assert found["seed"].endswith("# --seed")
    assert found["epochs"].split() == ["epochs:", "null", "#", "default"]


def test_what_show_prints_is_the_same_config(poros, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: './m: x'\ndata: {a.jsonl: 1, 'b c': 0.5}\noutput: 2024-01-01\n"
        "optimizer: {eps: 1e-9, learning_rate: 3e-4}\n"
        "lora: {targets: [q_proj], rank_pattern: {'.*q_proj': 2}}\nnumerics: {compute_dtype: float32}\nvram: 8GB\n"
    )
    (tmp_path / "resolved.yaml").write_text(poros("config", "show", file))
    assert load_config(tmp_path / "resolved.yaml") == load_config(file)


def test_show_refuses_what_train_would_refuse(poros, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ndata: d\noutput: o\nlora: {r: 4}\n")
    assert "Did you mean `lora.rank`?" in poros("config", "show", file, code=2)
