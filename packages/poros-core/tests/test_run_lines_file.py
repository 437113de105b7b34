"""A file of JSON lines holds whole lines only, whatever happens."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import poros
from poros.checkpoint import newest_complete
from poros.errors import OutputError
from poros.run.lines_file import LinesFile


def test_a_full_disk_leaves_no_half_line_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = LinesFile(tmp_path / "lines.jsonl")
    lines.open(0)
    lines.append({"step": 1})
    write, calls = os.write, []

    def full(descriptor: int, data: memoryview) -> int:
        calls.append(1)
        if len(calls) == 1:
            return write(descriptor, bytes(data[:4]))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OutputError, match=r"Cannot write .*No space left on device.*`--resume`"):
        lines.append({"step": 2})
    monkeypatch.undo()
    lines.close()
    assert (tmp_path / "lines.jsonl").read_text() == '{"step": 1}\n'


def test_a_write_that_takes_a_part_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = LinesFile(tmp_path / "lines.jsonl")
    lines.open(0)
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data[:3])))
    lines.append({"step": 1, "text": "abc"})
    lines.close()
    assert json.loads((tmp_path / "lines.jsonl").read_text()) == {"step": 1, "text": "abc"}


def test_opening_drops_later_damaged_and_unfinished_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe\n[' + b"[" * 5000 + b'\n{"step": 3}\n{"step": 2}\n{"step": 1')
    lines = LinesFile(path)
    lines.open(2)
    lines.close()
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_nothing_is_written_outside_of_a_run(tmp_path: Path) -> None:
    LinesFile(tmp_path / "lines.jsonl").append({"step": 1})
    assert not (tmp_path / "lines.jsonl").exists()


def test_a_disk_that_is_full_at_a_step_ends_the_run_with_its_checkpoint_intact(
    make_trainer: Callable[..., poros.Trainer],
    make_steps: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = make_steps(num_rows=4, accumulation=1, epochs=1)
    write = os.write

    def full(descriptor: int, data: memoryview) -> int:
        if b'"step": 3' in bytes(data):
            write(descriptor, bytes(data[:7]))
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    with (
        make_trainer(tmp_path, steps=steps, save_every=2) as trainer,
        pytest.raises(OutputError, match="No space left on device"),
    ):
        trainer.run()
    monkeypatch.undo()
    assert "No space left" in json.loads((tmp_path / "run.json").read_text())["failure"]
    assert newest_complete(tmp_path) == (tmp_path / "checkpoints" / "step-000002", [])
    with make_trainer(tmp_path, steps=steps, resume=True) as trainer:
        assert trainer.run().steps == 4
    told = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in told] == [1, 2, 3, 4]
