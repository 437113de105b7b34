"""`poros bench`: streamed and resident side by side, from a config alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from poros.bench import BenchSpec
from poros.bench import measure as core
from poros_cli import bench_table
from poros_cli import main as cli

FEW = ("--seq-len", "8", "--steps", "1", "--rank", "2", "--device", "cpu")


@pytest.fixture
def folder(saved_model: Path, tmp_path: Path) -> Path:
    """A folder that holds a config and no weights."""
    shutil.copy(saved_model / "config.json", tmp_path)
    return tmp_path


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> list[BenchSpec]:
    """Measure in this process: starting two others that import torch is what costs time."""
    seen: list[BenchSpec] = []

    def measure(spec: BenchSpec) -> dict[str, Any]:
        seen.append(spec)
        return core.run(json.loads(spec.to_json()))

    monkeypatch.setattr(bench_table, "run_spec", measure)
    return seen


def test_streamed_and_resident_are_shown_side_by_side(
    folder: Path, specs: list[BenchSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["bench", str(folder), *FEW]) == 0
    out = capsys.readouterr().out
    for text in ("streamed", "resident", "tokens a second", "share of the bound", "peak on the host"):
        assert text in out
    assert [spec.make_request().residency for spec in specs] == ["streamed", "resident"]


def test_json_holds_both_results_and_the_limit_binds_the_streamed_one(
    folder: Path, specs: list[BenchSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["bench", str(folder), *FEW, "--vram", "2GB", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert results["streamed"]["slowdown"] > 0
    assert [spec.memory_limit_bytes for spec in specs] == [2_000_000_000, None]


def test_a_run_that_fails_is_named_and_the_exit_code_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = {"error": {"kind": "out of memory", "message": "tried to allocate", "trace": ""}}
    monkeypatch.setattr(bench_table, "run_spec", lambda spec: error)
    assert cli.run(["bench", str(folder), *FEW]) == 1
    assert "streamed: out of memory: tried to allocate" in capsys.readouterr().out


def test_what_the_measuring_process_refuses_is_the_users_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = "ConfigError: Bad setting `device`: expected auto, cpu, cuda or cuda:N, got 'tpu'."
    error = {"error": {"kind": "refused", "message": message, "trace": ""}}
    monkeypatch.setattr(bench_table, "run_spec", lambda spec: error)
    assert cli.run(["bench", str(folder), *FEW, "--device", "tpu"]) == 2
    assert capsys.readouterr().err.strip() == "Error: " + message.removeprefix("ConfigError: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--vram", "6"), "expected a size: 8GB"),
        (("--quantization", "nf5"), "`nf4`"),
    ],
)
def test_bad_input_is_one_message(
    arguments: tuple[str, str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["bench", str(folder), *FEW, *arguments]) == 2
    assert message in capsys.readouterr().err
