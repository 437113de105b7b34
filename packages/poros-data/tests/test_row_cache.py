"""Tokenized rows on disk: used only where nothing changed, never trusted when damaged."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from poros_data import RowSettings, load_dataset
from poros_data.cache import RowCache
from poros_data.encode import Encoder

CHAT = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}


@pytest.fixture
def calls(monkeypatch):
    """How often rows were tokenized."""
    made = []
    tokenize = Encoder.tokenize
    monkeypatch.setattr(
        Encoder, "tokenize", lambda self, rows: made.append(len(rows)) or tokenize(self, rows)
    )
    return made


def load(path, tokenizer, folder, **settings):
    return load_dataset(path, tokenizer, max_length=64, cache_dir=folder, **settings)


def test_the_second_call_reads_the_same_rows_without_tokenizing(write, tokenizer, tmp_path, calls):
    path = write(CHAT, {"text": "x"}, {"messages": CHAT["messages"][:1]})
    first = load(path, tokenizer, tmp_path / "rows")
    assert len(calls) == 1
    second = load(path, tokenizer, tmp_path / "rows")
    assert len(calls) == 1
    assert (second.rows, second.report, second.parts) == (first.rows, first.report, first.parts)


def test_whatever_decides_the_rows_is_in_the_key(write, make_tokenizer, tmp_path, calls):
    path, folder = write(CHAT), tmp_path / "rows"
    load(path, make_tokenizer(), folder)
    write({**CHAT, "id": 1})
    load(path, make_tokenizer(), folder)
    load(path, make_tokenizer("{# other #}" + make_tokenizer().chat_template), folder)
    load(path, make_tokenizer(eos_token="<|endoftext|>"), folder)
    load(path, make_tokenizer(), folder, settings=RowSettings(truncation="truncate-left"))
    load_dataset(path, make_tokenizer(), max_length=65, cache_dir=folder)
    load(path, make_tokenizer(), folder, stop_token_ids=[1])
    assert len(calls) == 7
    assert len(list(folder.iterdir())) == 7


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "foreign"])
def test_a_damaged_file_is_replaced_with_a_warning(write, tokenizer, tmp_path, calls, damage):
    path, folder = write(CHAT, CHAT), tmp_path / "rows"
    first = load(path, tokenizer, folder)
    (file,) = folder.iterdir()
    raw = file.read_bytes()
    file.write_bytes(
        {"cut": raw[:-4], "flip": raw[:-1] + bytes([raw[-1] ^ 1]), "empty": b"", "foreign": b"{}"}[damage]
    )
    with pytest.warns(UserWarning, match="damaged and are made anew"):
        second = load(path, tokenizer, folder)
    assert second.rows == first.rows
    assert file.read_bytes() == raw
    assert len(calls) == 2


def test_a_file_that_changes_while_it_is_read_is_not_kept(write, tokenizer, tmp_path, monkeypatch):
    path = write(CHAT)
    monkeypatch.setattr("poros_data.dataset._Reading.digest_files", lambda self: "what the file was before")
    load(path, tokenizer, tmp_path / "rows")
    assert not (tmp_path / "rows").exists()


def test_a_folder_that_cannot_be_written_to_costs_a_warning_only(write, tokenizer, tmp_path):
    (tmp_path / "file").write_text("in the way")
    path = write(CHAT)
    with pytest.warns(UserWarning, match=r"Cannot keep tokenized rows.*name another `cache_dir`"):
        found = load(path, tokenizer, tmp_path / "file" / "rows")
    assert found.rows == load(path, tokenizer, None).rows


def test_a_half_written_file_of_a_killed_process_is_swept_and_one_that_is_being_written_is_not(
    write, tokenizer, tmp_path
):
    fcntl = pytest.importorskip("fcntl")
    dead, busy, young = (tmp_path / f".rows-{name}" for name in ("dead", "busy", "young"))
    for path in (dead, busy, young):
        path.write_bytes(b"half")
    for path in (dead, busy):
        os.utime(path, (0, 0))
    with busy.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        load(write(CHAT), tokenizer, tmp_path)
    assert [path.exists() for path in (dead, busy, young)] == [False, True, True]


def save_and_load(folder: str, barrier, results) -> None:
    from poros_data.report import DataReport
    from poros_data.rows import Row

    report = DataReport(
        sources=(),
        num_rows=1,
        schemas={},
        dropped={},
        truncated={},
        cut_tokens=0,
        repaired=None,
        lost_turns={},
        supervised_tokens=1,
        total_tokens=2,
        longest_tokens=2,
        lengths={2: 1},
        last_supervised_token="x",
        last_supervised_id=1,
        warnings=(),
    )
    rows = [Row(list(range(500)), [-100] * 500, line) for line in range(200)]
    cache = RowCache(Path(folder))
    barrier.wait()
    for _ in range(5):
        cache.save("key", rows, report)
        found = cache.load("key")
        results.put(found is not None and len(found[0]) == 200)


def test_two_processes_may_write_the_same_rows_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=save_and_load, args=(str(tmp_path), barrier, results)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    assert all(results.get(timeout=30) for _ in range(10))
    for process in processes:
        process.join(timeout=30)
    assert len(list(tmp_path.iterdir())) == 1
