"""`poros train`, `check` and `quickstart` on the command line: what is refused before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

from poros_cli import main as cli
from poros_cli.config import RunConfig
from poros_cli.quickstart import prepare
from poros_cli.run_options import FLAGS, config_arguments, config_from

THREE = ("--model", "m", "--data", "d", "--output", "o")
# What a flag needs beside it.
COMPANIONS = {
    "--eval-every": ("--eval-data", "e"),
    "--keep-best": ("--eval-data", "e", "--eval-every", "5"),
    "--early-stop-patience": ("--eval-data", "e", "--eval-every", "5"),
}
VALUES = {
    "--resume": None,
    "--overwrite": None,
    "--keep-best": None,
    "--residency": "resident",
    "--order": "micro-batch-major",
    "--vram": "5GiB",
    "--truncation": "error",
    "--ram": "24GB",
}


def parse(*arguments: str) -> RunConfig:
    """Parse flags as `poros train` does, without the command's body."""
    found: list[RunConfig] = []

    @click.command()
    @config_arguments
    def command(config_file: Path | None, overrides: tuple[str, ...], **flags: Any) -> None:
        found.append(config_from(config_file, overrides, flags))

    outcome = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return found[0]


def test_absent_flags_leave_defaults() -> None:
    assert parse(*THREE) == RunConfig(model="m", data="d", output="o")


def test_absent_switches_do_not_override_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: m\ndata: d\noutput: o\nresume: true\n")
    assert parse(str(tmp_path / "run.yaml")).resume is True


@pytest.mark.parametrize(
    "flag", [flag for flag in FLAGS if flag.flag not in THREE], ids=lambda flag: flag.flag
)
def test_every_flag_changes_its_setting(flag: Any) -> None:
    text = VALUES.get(
        flag.flag, "cpu" if flag.flag == "--device" else "5" if flag.type is not float else "0.5"
    )
    extra = COMPANIONS.get(flag.flag, ())
    config = parse(*THREE, *extra, flag.flag, *([] if text is None else [text]))
    assert config != parse(*THREE, *extra)


def test_targets_are_split_at_commas() -> None:
    assert parse(*THREE, "--targets", "q_proj, v_proj").lora.targets == ("q_proj", "v_proj")


def test_file_set_and_flags_go_together(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: m\ndata: d\noutput: o\nlora: {rank: 4}\nseed: 1\n")
    config = parse(str(tmp_path / "run.yaml"), "--set", "seed=2", "--set", "lora.alpha=8", "--rank", "2")
    assert (config.seed, config.lora.alpha, config.lora.rank) == (2, 8, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "m"), "Missing settings: expected `data`, `output`"),
        ((*THREE, "--device", "cuda"), "Cannot use device `cuda`: expected a CUDA device, got none"),
        ((*THREE, "--device", "tpu"), "`device`: expected auto, cpu, cuda or cuda:N"),
        ((*THREE, "--max-steps", "0"), "0 is not in the range"),
        (("absent.yaml",), "Cannot read the config"),
    ],
)
def test_train_refuses_with_exit_code_2(
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.run(["train", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_train_refuses_many_processes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.run(["train", *THREE]) == 2
    assert "`WORLD_SIZE` is 2: start `poros train` without torchrun" in capsys.readouterr().err


def test_quickstart_without_its_model_names_what_to_add(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(prepare, "missing_distributions", lambda: ["gguf"])
    assert cli.run(["quickstart", "--output", str(tmp_path)]) == 2
    assert "Run `uv add gguf`" in capsys.readouterr().err
