"""`poros train` with the settings under `rows`, weighted sources and kept rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from poros.plugins import load_registry
from poros_arch_qwen.architectures import Qwen2
from poros_cli.assemble import assemble
from poros_cli.config import RunConfig
from poros_cli.main import run


def train(model: Path, output: Path, *more: str) -> int:
    arguments = ["--model", str(model), "--output", str(output), "--device", "cpu", "--micro-batches", "6"]
    return run(["train", *arguments, "--rank", "2", "--set", "numerics.compute_dtype=float32", *more])


def metrics(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_packing_trains_the_same_tokens_in_fewer_positions(
    saved_model: Path, rows: Path, tmp_path: Path
) -> None:
    common = ("--data", str(rows), "--max-length", "128", "--set", "numerics.length_bucket=16")
    for name, packing in (("packed", "true"), ("alone", "false")):
        assert train(saved_model, tmp_path / name, *common, "--set", f"rows.packing={packing}") == 0
    packed, alone = metrics(tmp_path / "packed"), metrics(tmp_path / "alone")
    assert sum(m["supervised_tokens"] for m in packed) == sum(m["supervised_tokens"] for m in alone)
    assert sum(m["tokens"] for m in packed) < sum(m["tokens"] for m in alone)
    assert len(packed) < len(alone)


def test_packing_is_refused_for_a_family_that_leaks(
    saved_model: Path,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Qwen2, "packs_rows", False)
    assert train(saved_model, tmp_path / "out", "--data", str(rows), "--set", "rows.packing=true") == 2
    err = capsys.readouterr().err
    assert "Cannot pack rows for this model: " in err
    assert "got `qwen2` with `full_attention` blocks (rows.packing)" in err
    assert not list((tmp_path / "out").iterdir())


def test_weights_decide_how_often_rows_come(saved_model: Path, rows: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    shutil.copy(rows, other)
    weights = f"data={{{rows}: 1, {other}: 0.5}}"
    assert train(saved_model, tmp_path / "out", "--set", weights) == 0
    assert len(metrics(tmp_path / "out")) == 3  # 18 visits in steps of 6


def test_the_second_start_reads_kept_rows(
    saved_model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("--data", str(rows), "--max-steps", "1", "--cache-dir", str(tmp_path / "cache"))
    assert train(saved_model, tmp_path / "first", *common) == 0
    assert len(list((tmp_path / "cache" / "rows").iterdir())) == 1
    monkeypatch.setattr(
        "poros_data.encode.Encoder.tokenize", lambda *_: pytest.fail("rows were tokenized again")
    )
    assert train(saved_model, tmp_path / "second", *common) == 0
    assert [m["loss"] for m in metrics(tmp_path / "first")] == [
        m["loss"] for m in metrics(tmp_path / "second")
    ]


@pytest.mark.parametrize("order", ["length-sorted", "file"])
def test_the_order_of_rows_is_a_setting(saved_model: Path, rows: Path, tmp_path: Path, order: str) -> None:
    common = ("--data", str(rows), "--max-steps", "1", "--set", f"rows.order={order}")
    assert train(saved_model, tmp_path / "out", *common) == 0


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("rows.truncation=cut", "Bad setting `truncation`: expected drop | truncate-left"),
        ("rows.packed=true", "Did you mean `rows.packing`?"),
        ("unusable_rows=drop", "Did you mean `rows.truncation`?"),
        ("sample_packing=true", "Did you mean `rows.packing`?"),
        ("data={a: 0}", "Bad setting `data`: Bad weight of the data source `a`"),
        ("data=[a, a]", "got `a` twice"),
    ],
)
def test_bad_settings_of_data_name_the_place(
    saved_model: Path, tmp_path: Path, setting: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(saved_model, tmp_path / "out", "--set", "data=d", "--set", setting) == 2
    err = capsys.readouterr().err
    assert said in err
    assert f"--set {setting}" in err


def test_held_out_rows_go_through_in_micro_batches_of_the_training(
    saved_model: Path, rows: Path, tmp_path: Path
) -> None:
    config = RunConfig(
        model=str(saved_model),
        data=str(rows),
        eval_data=str(rows),
        output=str(tmp_path / "out"),
        device="cpu",
        micro_batch_size=5,
    )
    trainer = assemble(config, load_registry(), reporters=(), say=lambda line: None).trainer
    assert [batch.input_ids.shape[0] for batch in trainer.evaluation] == [5, 5, 2]
