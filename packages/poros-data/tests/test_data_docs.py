"""The documentation's rows and example work as printed."""

from __future__ import annotations

import json
import re
from pathlib import Path

from poros_data import SCHEMAS
from poros_data.schemas import parse_row

README = Path(__file__).parents[1] / "README.md"
PAGE = Path(__file__).parents[3] / "docs" / "data.md"


def test_every_format_is_documented_with_a_row_in_it():
    rows = re.findall(r"^\| `([\w-]+)` \| `(\{.*?\})`", PAGE.read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == [schema.name for schema in SCHEMAS]
    for name, row in rows:
        assert parse_row(json.loads(row), where="docs/data.md")[0] == name


def test_the_example_of_the_readme_runs(write, tokenizer, tmp_path, monkeypatch, capsys):
    tokenizer.save_pretrained(tmp_path / "path" / "to" / "model")
    write({"text": "hello"}).rename(tmp_path / "chats.jsonl")
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(compile(example, str(README), "exec"), {})
    assert "chats.jsonl: 1 of 1 rows used (1 text)" in capsys.readouterr().out
