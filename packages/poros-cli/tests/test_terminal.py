"""Nothing that comes from a file reaches the terminal as a command to it."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from poros_cli.main import run
from poros_cli.terminal import TerminalConsole, printable

EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\x08\u202egnp.exe\u2028"
OBEYED = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\u2028-\u202e]")


def test_everything_that_a_terminal_obeys_becomes_an_escape() -> None:
    shown = r"\x1b[2J\x1b]0;owned\x07\x9b31m\x0d\x08\u202egnp.exe\u2028"
    assert printable(EVIL) == shown


@pytest.mark.parametrize("text", ["plain\n\ttext", "\u00e4\u4e2d\U0001f9a5", ""])
def test_ordinary_text_stays(text: str) -> None:
    assert printable(text) == text


def test_half_a_character_becomes_an_escape() -> None:
    assert printable("\ud800") == r"\ud800"


def test_a_long_text_is_cut_and_counted() -> None:
    assert printable("a" * 50, max_characters=10) == "a" * 10 + " ...(40 more characters)"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_console_writes_no_sequence_but_its_own(terminal: bool) -> None:
    out = io.StringIO()
    console = TerminalConsole(
        file=out, force_terminal=terminal, color_system="standard" if terminal else None
    )
    table = Table(title="t")
    table.add_row(Text(EVIL))
    console.print(table)
    console.print(Text(EVIL, style="bold"))
    own = re.compile("\x1b\\[[0-9;]*m")
    assert not OBEYED.search(own.sub("", out.getvalue()))
    assert "owned" in out.getvalue()
    assert bool(own.search(out.getvalue())) is terminal


def test_an_error_shows_a_hostile_name_with_escapes(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][EVIL] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    out = tmp_path / "out"
    assert (
        run(["train", "--model", str(model), "--data", str(rows), "--output", str(out), "--device", "cpu"])
        == 2
    )
    shown = capsys.readouterr()
    assert r"\x1b[2J" in shown.err
    assert not OBEYED.search(shown.err)


def test_an_unknown_column_is_shown_with_escapes(
    saved_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({EVIL: 1}) + "\n")
    assert run(["data", "preview", "--model", str(saved_model), str(data)]) == 2
    assert not OBEYED.search(capsys.readouterr().err)


def test_a_row_with_escape_sequences_is_previewed_with_escapes(
    saved_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"instruction": EVIL, "output": EVIL}) + "\n")
    assert run(["data", "preview", "--model", str(saved_model), str(data)]) == 0
    shown = capsys.readouterr()
    assert "owned" in shown.out
    assert not OBEYED.search(shown.out + shown.err)
