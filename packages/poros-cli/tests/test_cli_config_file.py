"""Config files: what is read, what overrides what, and where an error is said to be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from poros.errors import ConfigError
from poros.settings import LoraSettings
from poros_cli.config import RunConfig
from poros_cli.config_file import load_config

MINIMAL = "model: m\ndata: d.jsonl\noutput: out\n"


def load(tmp_path: Path, text: str, *overrides: str, **flags: tuple[str, object]) -> RunConfig:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return load_config(file, overrides=overrides, flags=flags)


def test_defaults_fill_what_the_file_leaves_out(tmp_path: Path) -> None:
    assert load(tmp_path, MINIMAL) == RunConfig(model="m", data="d.jsonl", output="out")


def test_sections_become_their_settings(tmp_path: Path) -> None:
    text = (
        MINIMAL
        + "lora: {rank: 4, targets: [q_proj], rank_pattern: {down: 2}}\nplan: {slots: 2, pin: false}\n"
    )
    config = load(tmp_path, text + "numerics: {compute_dtype: float32}\noptimizer: {learning_rate: 1e-3}\n")
    assert config.lora == LoraSettings(rank=4, targets=("q_proj",), rank_pattern={"down": 2})
    assert (config.plan.num_slots, config.plan.pin_host_memory) == (2, False)
    assert config.numerics.compute_dtype == torch.float32
    assert config.optimizer.learning_rate == 1e-3


def test_flags_override_set_and_set_overrides_the_file(tmp_path: Path) -> None:
    text = MINIMAL + "seed: 1\nepochs: 1\nlora: {rank: 1, alpha: 1}\n"
    file = tmp_path / "run.yaml"
    file.write_text(text)
    config = load_config(
        file,
        overrides=["seed=2", "epochs=2", "lora.rank=2"],
        flags={"seed": ("--seed", 3), "max_steps": ("--x", 9)},
    )
    assert (config.seed, config.epochs, config.max_steps) == (3, 2, 9)
    assert (config.lora.rank, config.lora.alpha) == (2, 1)


def test_the_last_of_two_overrides_wins(tmp_path: Path) -> None:
    assert load(tmp_path, MINIMAL, "seed=1", "seed=2").seed == 2


def test_an_override_may_give_a_whole_section(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL + "lora: {rank: 4, dropout: 0.5}\n", "lora={rank: 8}")
    assert (config.lora.rank, config.lora.dropout) == (8, 0.5)


def test_flags_alone_are_enough() -> None:
    flags = {name: (f"--{name}", name) for name in ("model", "data", "output")}
    assert load_config(None, flags=flags) == RunConfig(model="model", data="data", output="output")


def test_a_null_override_restores_an_optional_default(tmp_path: Path) -> None:
    assert load(tmp_path, MINIMAL + "max_steps: 3\n", "max_steps=null").max_steps is None


BAD_FILES = {
    "unknown key": ("epoch: 3\n", r"Unknown setting `epoch` \(.*run.yaml:4:1\). Did you mean `epochs`\?"),
    "unknown key in a section": (
        "lora:\n  rang: 3\n",
        r"Unknown setting `lora.rang` \(.*run.yaml:5:3\). Did you mean `lora.rank`\?",
    ),
    "a name from elsewhere": ("lora_alpha: 3\n", r"`lora_alpha` .*Did you mean `lora.alpha`\?"),
    "a key in the wrong place": ("rank: 3\n", r"Unknown setting `rank` .*Did you mean `lora.rank`\?"),
    "nothing near": ("zzzzqqqq: 3\n", r"Unknown setting `zzzzqqqq` .*Known: model, data, .*plan\."),
    "doubled key": ("seed: 1\nseed: 2\n", r"`seed`: expected one value, got two \(.*:4:1 and .*:5:1\)"),
    "wrong type": ("seed: many\n", r"`seed`: expected an integer, got `many` \(text\) \(.*run.yaml:4:7\)"),
    "value out of range": ("epochs: 0\n", r"`epochs`: expected a positive integer, got 0 \(.*run.yaml:4:1\)"),
    "section value out of range": (
        "lora: {rank: -1}\n",
        r"`lora.rank`: expected a positive integer, got -1 \(.*run.yaml:4:8\)",
    ),
    "renamed section value": (
        "plan: {slots: 1}\n",
        r"`slots`: expected 2 or more, got 1 \(.*run.yaml:4:8\)",
    ),
    "section without keys": ("lora: 3\n", r"Bad section `lora`: expected keys among rank, .*run.yaml:4:1"),
    "merge key": ("<<: {seed: 1}\n", r"Bad key: expected the name of a setting, got a merge key"),
    "list as key": ("? [a]\n: 1\n", r"Bad key: .*got a list or mapping"),
    "eval_every alone": ("eval_every: 2\n", r"`eval_every`: expected `eval_data` beside it"),
    "resume and overwrite": ("resume: true\noverwrite: true\n", r"expected at most one of them, got both"),
    "unknown device": (
        "device: gpu\n",
        r"`device`: expected auto, cpu, cuda or cuda:N, got 'gpu' \(.*:4:1\)",
    ),
    "negative seed": ("seed: -1\n", r"`seed`: expected 0 .. 2\*\*63 - 1, got -1"),
    "broken YAML": ("lora: [1,\n", r"Cannot parse YAML: expected valid YAML, got .*run.yaml:5:1"),
    "tab": ("lora:\n\trank: 1\n", r"Cannot parse YAML: .*run.yaml:5:1"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file_is_refused_with_its_place(name: str, tmp_path: Path) -> None:
    text, message = BAD_FILES[name]
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, MINIMAL + text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got an empty file"),
        ("- a\n", r"got a list \(.*run.yaml:1:1\)"),
        ("just words\n", "got `just words`"),
        ("data: d\n", "Missing settings: expected `model`, `output`.*--model ... --output ..."),
        ("model: ''\ndata: d\noutput: o\n", r"`model`: expected a path or name, got nothing \(.*:1:1\)"),
    ],
)
def test_file_without_required_settings_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a readable YAML file"):
        load_config(tmp_path / "absent.yaml")


def test_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="expected a readable YAML file"):
        load_config(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "expected `--set key=value`, got `--set seed`"),
        ("=3", "expected `--set key=value`"),
        ("sed=3", r"Unknown setting `sed` \(--set sed=3\). Did you mean `seed`\?"),
        ("seed=x", r"expected an integer, got `x` \(text\) \(--set seed=x\)"),
        ("lora=3", "Bad section `lora`: expected keys among rank"),
        ("lora={rank: x}", r"`lora.rank`: expected an integer, got `x` .*--set lora={rank: x}"),
        ("lora.targets=q,v", r"expected a list, each text, got `q,v` .*Write `\[q, v\]`"),
        ("lora.rank=-2", r"`lora.rank`: expected a positive integer, got -2 \(--set lora.rank=-2\)"),
        ("model=[", r"Cannot parse YAML: .*--set model=\["),
    ],
)
def test_bad_override_is_refused_with_its_text(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, MINIMAL, override)


def test_a_flag_out_of_range_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`dropout`|`lora.dropout`: .*\(--dropout\)"):
        load_config(
            None,
            flags={
                **{name: (f"--{name}", name) for name in ("model", "data", "output")},
                "lora.dropout": ("--dropout", 2.0),
            },
        )
