"""The rules of the output folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from poros.checkpoint import check_free_space, prepare_output_folder
from poros.errors import ConfigError, OutputError


def test_a_new_folder_is_created_with_its_parents(tmp_path: Path) -> None:
    assert prepare_output_folder(tmp_path / "a" / "b").is_dir()


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert prepare_output_folder(tmp_path) == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_content_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    with pytest.raises(OutputError, match=r"1 entries \(adapter\).*--resume.*--overwrite"):
        prepare_output_folder(tmp_path)
    assert (tmp_path / "adapter").is_dir()


def test_resume_keeps_the_content(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("x")
    prepare_output_folder(tmp_path, resume=True, owned=["metrics.jsonl"])
    assert (tmp_path / "metrics.jsonl").read_text() == "x"


def test_overwrite_removes_what_a_run_owns_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text("x")
    (tmp_path / "thesis.tex").write_text("x")
    prepare_output_folder(tmp_path, overwrite=True, owned=["checkpoints", "metrics.jsonl", "adapter"])
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_overwrite_removes_a_link_and_not_what_it_points_at(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "keep").write_text("x")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoints").symlink_to(tmp_path / "elsewhere")
    prepare_output_folder(tmp_path / "out", overwrite=True, owned=["checkpoints"])
    assert (tmp_path / "elsewhere" / "keep").exists()
    assert list((tmp_path / "out").iterdir()) == []


def test_resume_and_overwrite_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"together"):
        prepare_output_folder(tmp_path, resume=True, overwrite=True)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    with pytest.raises(OutputError, match=r"got a file"):
        prepare_output_folder(tmp_path / "f")
    with pytest.raises(OutputError, match=r"can be written"):
        prepare_output_folder(tmp_path / "f" / "below")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    with pytest.raises(OutputError, match=r"Read-only file system"):
        prepare_output_folder(tmp_path / "x")


def test_too_little_disk_space_names_both_numbers(tmp_path: Path) -> None:
    check_free_space(tmp_path / "not" / "yet", 1, "checkpoints")
    with pytest.raises(
        OutputError, match=r"for 3 checkpoints: expected \d+ bytes free \(\d+\.\d\d GiB\), got \d+ bytes"
    ):
        check_free_space(tmp_path / "not" / "yet", 10**18, "3 checkpoints")
