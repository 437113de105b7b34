"""Files of every kind, folders, hub ids, several sources with weights, and what is said when one cannot be read."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from poros_data import DataError, Source, load_dataset
from poros_data.records import read_records
from poros_data.sources import as_sources, files_of

CHAT = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}


def read(path: Path) -> list[tuple[int, dict]]:
    files, _ = files_of(Source(name=str(path)))
    return [(record.line, record.value) for file in files for record in read_records(file)]


def failure(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read(path)
    return str(caught.value)


def json_file(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "data.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('[{"text": "a"},\n {"text": "b"}]\n', [(1, "a"), (2, "b")]),
        ('\ufeff[\n  {\n    "text": "a"\n  },\n  {"text": "b"}\n]', [(2, "a"), (5, "b")]),
        ('{"text": "a"}\n{"text": "b"}\n', [(1, "a"), (2, "b")]),
        ('{\n  "text": "a"\n}\n\n{"text": "b"} {"text": "c"}', [(1, "a"), (5, "b"), (5, "c")]),
    ],
)
def test_a_json_file_is_an_array_or_objects_in_a_row(tmp_path, text, rows):
    assert [(line, value["text"]) for line, value in read(json_file(tmp_path, text))] == rows


@pytest.mark.parametrize(
    ("text", "where", "said"),
    [
        ('[{"text": "a"},\n {"text" "b"}]', ":2:10)", "Expecting ':' delimiter"),
        ('[{"text": "a"}\n {"text": "b"}]', ":2:2)", "no comma between two rows"),
        ('[{"text": "a"}', ":1:15)", "the array does not end"),
        ('[{"text": "a"}] x', ":1:17)", "text after the array"),
        ('[{"text": "a"},\n 7]', ":2:2)", "a row is a number"),
        ('[{"text": "a", "text": "b"}]', ":1:2)", "stands twice"),
        ('[{"text": "\\ud83d"}]', ":1:12)", "half of a surrogate pair"),
        (b'[{"text": "\xe9"}]', ":1:1)", "not UTF-8"),
        ("[]", "", "got an empty array"),
        ("", "", "got an empty file"),
        (b"PAR1", "", "a Parquet file"),
    ],
)
def test_bad_json_names_file_line_column_and_reason(tmp_path, text, where, said):
    path = json_file(tmp_path, text)
    message = failure(path)
    assert said in message
    assert f"{path}{where}" in message


def test_a_text_file_is_one_row(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("Call me Ishmael.\n\nSome years ago", encoding="utf-8")
    assert read(path) == [(1, {"text": "Call me Ishmael.\n\nSome years ago"})]


@pytest.mark.parametrize(
    ("raw", "said"), [(b" \n", "an empty file"), (b"a\n\xff", ":2)"), (b"PK\x03\x04", "zip")]
)
def test_a_bad_text_file_is_refused(tmp_path, raw, said):
    path = tmp_path / "book.txt"
    path.write_bytes(raw)
    assert said in failure(path)


def test_a_folder_is_read_in_the_order_of_its_names_and_names_what_is_no_data(tmp_path, tokenizer):
    for name in ("b.jsonl", "a.json", "deep/c.txt"):
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": name}) if name != "deep/c.txt" else "plain words")
    (tmp_path / "set" / "README.md").write_text("about")
    (tmp_path / "set" / ".hidden.jsonl").write_text("{}")
    data = load_dataset(tmp_path / "set", tokenizer, max_length=256)
    assert [Path(file.name).name for file in data.files] == ["a.json", "b.jsonl", "c.txt"]
    (source,) = data.report.sources
    assert (source.num_files, source.num_rows, source.ignored) == (3, 3, ("README.md",))
    assert any("no data in 1 files" in line and "README.md" in line for line in data.report.lines())


def test_a_folder_without_data_lists_what_it_holds(tmp_path):
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(DataError, match=r"a folder with \.jsonl, .*got notes\.md"):
        files_of(Source(name=str(tmp_path)))


def test_sources_are_reported_one_by_one_and_rows_know_their_file(tmp_path, tokenizer):
    for name, rows in (("a.jsonl", [CHAT] * 2), ("b.jsonl", [{"text": "x"}, {"messages": []}])):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = {str(tmp_path / "a.jsonl"): 1.0, str(tmp_path / "b.jsonl"): 0.5}
    with pytest.raises(DataError, match=r"b\.jsonl:2.* 1 of 4 rows cannot be used"):
        load_dataset(names, tokenizer, max_length=64)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "x"}) + "\n")
    data = load_dataset(names, tokenizer, max_length=64)
    assert data.row_weights == [1.0, 1.0, 0.5]
    assert data.where(data.rows[2]).endswith("b.jsonl:1")
    assert data.report.lines()[1].endswith("b.jsonl: 1 of 1 rows used (1 text, weight 0.5)")
    assert data.report.schemas == {"messages": 2, "text": 1}


def test_without_weights_no_row_has_one(write, tokenizer):
    assert load_dataset(write(CHAT), tokenizer, max_length=64).row_weights is None


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ([], "expected at least one source, got none"),
        (["a", "a"], "expected each source once, got `a` twice"),
        ({"a": 0}, "Bad weight of the data source `a`: expected a positive number, got 0"),
        ({"a": float("nan")}, "expected a positive number, got nan"),
        (" ", "expected a file, folder or hub id"),
    ],
)
def test_bad_sources_are_refused(spec, said):
    with pytest.raises(DataError, match=said):
        as_sources(spec)


def test_parquet_rows_are_read_and_counted_as_rows(tmp_path, tokenizer):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "data.parquet"
    rows = [{**CHAT, "tools": None}, {"messages": CHAT["messages"][:1], "tools": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    data = load_dataset(path, tokenizer, max_length=64)
    assert data.where(data.rows[0]) == f"{path}, row 1"
    assert data.report.dropped["no supervised token"].first == "row 2"
    path.write_bytes(b"PAR1 and nothing else")
    assert "expected a Parquet file, got ArrowInvalid" in failure(path)


def test_parquet_without_its_library_is_refused_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    assert "uv add 'poros-data[parquet]'" in failure(tmp_path / "data.parquet")


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the package `datasets`, which these tests must not need."""
    module = types.ModuleType("datasets")
    asked = []

    def load(repository, config, split):
        asked.append((repository, config, split))
        if repository == "owner/gated":
            raise RuntimeError("401 Client Error: gated repo\nmore")
        return [CHAT, {"text": "x"}]

    module.load_dataset = load
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("owner/name", ("owner/name", None, "train")),
        ("owner/name:test", ("owner/name", None, "test")),
        ("owner/name:main:train[:10%]", ("owner/name", "main", "train[:10%]")),
    ],
)
def test_a_hub_id_is_read_through_datasets(hub, tokenizer, name, asked):
    data = load_dataset(name, tokenizer, max_length=64)
    assert hub == [asked]
    assert data.where(data.rows[1]) == f"{name}, row 2"


def test_a_refusal_of_the_hub_says_what_it_means(hub, tokenizer):
    with pytest.raises(DataError, match="licence is not accepted or you are not logged in"):
        load_dataset("owner/gated", tokenizer, max_length=64)


def test_a_hub_id_without_datasets_is_refused_with_what_to_do(monkeypatch, tokenizer):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"Check the path, or install it: `uv add 'poros-data\[hub\]'`"):
        load_dataset("owner/name", tokenizer, max_length=64)


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "./owner/name", "owner/rows.json", "here/name", "/owner/name"]
)
def test_a_mistyped_path_is_never_looked_up(hub, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(DataError, match="expected an existing file"):
        files_of(Source(name=name))
    assert hub == []


def test_rows_of_tables_may_hold_what_json_does_not(tokenizer, monkeypatch, hub):
    import datetime

    sys.modules["datasets"].load_dataset = lambda *_, **__: [{"text": datetime.date(2026, 1, 1)}]
    with pytest.raises(DataError, match=r"expected a string, got a date.*owner/name, row 1"):
        load_dataset("owner/name", tokenizer, max_length=64)
