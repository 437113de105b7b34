"""Case 28 and its kind: what a JSON Lines file may look like, and what is said when it does not."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from poros_data.errors import DataError
from poros_data.reader import read_jsonl


def read(path: Path) -> list[tuple[int, dict]]:
    return [(record.line, record.value) for record in read_jsonl(path)]


def failure(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read(path)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_blank_lines_crlf_u2028_and_a_missing_final_newline_are_fine(write):
    path = write(b'{"text":"a"}\r\n\r\n   \n{"text":"b\xe2\x80\xa8c"}\n{"text":"d"}')
    assert read(path) == [(1, {"text": "a"}), (4, {"text": "b\u2028c"}), (5, {"text": "d"})]


def test_a_utf8_byte_order_mark_is_fine(write):
    assert read(write(b'\xef\xbb\xbf{"text":"a"}\n')) == [(1, {"text": "a"})]


def test_the_digest_sees_every_byte(write):
    raw = b'\xef\xbb\xbf{"text":"a"}\r\n\n{"text":"b"}'
    digest = hashlib.sha256()
    list(read_jsonl(write(raw), digest=digest))
    assert digest.digest() == hashlib.sha256(raw).digest()


def test_a_bad_line_names_file_line_and_column_its_start_and_the_number_of_bad_lines(write):
    long = b'{"text": oops ' + b"x" * 200 + b"}\n"
    path = write({"text": "a"}, long, {"text": "b"}, b"{bad}\n")
    message = failure(path)
    assert f"({path}:2:10)" in message
    assert '"{\\"text\\": oops ' + "x" * 66 + '..."' in message
    assert "2 bad lines in the file, 2 good" in message


def test_rows_before_a_bad_line_are_not_enough_to_go_on(write):
    rows = read_jsonl(write({"text": "a"}, b"oops\n"))
    assert next(rows).value == {"text": "a"}
    with pytest.raises(DataError, match="1 bad line in the file, 1 good"):
        next(rows)


@pytest.mark.parametrize(
    ("raw", "where", "said"),
    [
        (b'[{"text":"a"},\n {"text":"b"}]\n', ":1:", "This is JSON, not JSON Lines"),
        (b'[{"text":"a"}]\n', ":1:1)", "this is a JSON array, not JSON Lines"),
        (b'{\n  "text": "a"\n}\n', ":1:2)", "Write each object on one line"),
        (b'{"text":"a"} {"text":"b"}\n', ":1:14)", "Write one object per line"),
        (b'{"text":"a"},\n{"text":"b"}\n', ":1:13)", "Write one object per line"),
        (b'{"text":"a\tb"}\n', ":1:11)", "Escape control characters"),
        (b'{"text":"a\nb"}\n', ":1:9)", "A line break inside a string is written"),
        (b"<!DOCTYPE html>\n", ":1:1)", "looks like a web page"),
        (b"text,label\n", ":1:1)", "CSV and plain text are not JSON Lines"),
        (b'"text"\n', ":1:1)", "the line holds a string"),
        (b"17\n", ":1:1)", "the line holds a number"),
        (b'{"text":"a","text":"b"}\n', ":1:2)", "the key `text` stands twice"),
        (b'{"text":"\\ud83d"}\n', ":1:10)", "half of a surrogate pair"),
        (b'{"text":' + b"[" * 100_000 + b"\n", ":1:1)", "nested too deeply"),
        (b'{"id":' + b"9" * 5000 + b"}\n", ":1:1)", "Write the number as a string"),
        (b'{"text":"caf\xe9"}\n', ":1:13)", "byte 0xe9 is not UTF-8"),
    ],
)
def test_a_line_that_is_no_object_says_why_and_what_to_do(write, raw, where, said):
    message = failure(write(raw))
    assert where in message
    assert said in message


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        ('{"text":"a"}'.encode("utf-16"), "UTF-16"),
        (b"\x1f\x8b\x08\x00", "gzip"),
        (b"PAR1\x15\x04", "Parquet"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_a_file_of_another_format_is_named(write, raw, found):
    assert found in failure(write(raw))


def test_an_empty_file_and_blank_lines_are_no_data(write):
    assert "got an empty file" in failure(write(b""))
    assert "got 2 blank lines" in failure(write(b"\n  \r\n"))


def test_a_missing_file_names_the_nearest(write):
    path = write({"text": "a"})
    assert f"Did you mean `{path}`" in failure(path.with_name("dta.jsonl"))


def test_a_missing_folder_is_named(tmp_path):
    assert f"The folder `{tmp_path / 'no'}` does not exist either" in failure(tmp_path / "no" / "a.jsonl")
