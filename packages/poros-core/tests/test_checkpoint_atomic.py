"""A reader finds the old content or the new one, never a part."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from poros.checkpoint import atomic, atomic_folder, atomic_write_bytes, atomic_write_json
from poros.checkpoint.manifest import MANIFEST_FILE, check_manifest
from poros.errors import CheckpointError, OutputError


def save(target: Path, text: str, *, overwrite: bool = False) -> None:
    with atomic_folder(target, overwrite=overwrite) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a.txt").write_text(text)


def test_a_folder_appears_complete_with_its_manifest(tmp_path: Path) -> None:
    save(tmp_path / "deep" / "er" / "new", "hello")
    content = json.loads((tmp_path / "deep/er/new" / MANIFEST_FILE).read_text())
    assert content["files"]["sub/a.txt"]["bytes"] == 5
    check_manifest(tmp_path / "deep/er/new")
    assert [path.name for path in (tmp_path / "deep/er").iterdir()] == ["new"]


def test_the_folder_gets_the_users_permissions(tmp_path: Path) -> None:
    save(tmp_path / "new", "x")
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_nothing_appears_while_the_folder_is_filled(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "new") as folder:
        (folder / "a").write_text("x")
        assert not (tmp_path / "new").exists()
    assert (tmp_path / "new" / "a").exists()


def test_an_existing_folder_is_refused_without_overwrite(tmp_path: Path) -> None:
    save(tmp_path / "x", "old")
    with pytest.raises(OutputError, match=r"one that exists"):
        save(tmp_path / "x", "new")
    assert (tmp_path / "x/sub/a.txt").read_text() == "old"


def test_overwrite_replaces_everything_and_leaves_nothing_aside(tmp_path: Path) -> None:
    save(tmp_path / "x", "old")
    (tmp_path / "x" / "stale").write_text("x")
    save(tmp_path / "x", "new", overwrite=True)
    assert (tmp_path / "x/sub/a.txt").read_text() == "new"
    assert not (tmp_path / "x" / "stale").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def save_and_raise(target: Path, error: BaseException) -> None:
    with atomic_folder(target, overwrite=True) as folder:
        (folder / "a").write_text("half")
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("boom")])
def test_an_error_while_filling_leaves_the_old_folder_and_nothing_else(
    tmp_path: Path, error: BaseException
) -> None:
    save(tmp_path / "x", "old")
    with pytest.raises(type(error)):
        save_and_raise(tmp_path / "x", error)
    assert (tmp_path / "x/sub/a.txt").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_so_and_keeps_the_earlier_folder(tmp_path: Path, number: int) -> None:
    save(tmp_path / "x", "old")
    with pytest.raises(OutputError, match=r"bytes free.*saved earlier is intact.*Free some disk space"):
        save_and_raise(tmp_path / "x", OSError(number, os.strerror(number)))
    assert (tmp_path / "x/sub/a.txt").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_failed_last_rename_puts_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "x", "old")
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if ".tmp-" in self.name:
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OutputError, match=r"Input/output error"):
        save(tmp_path / "x", "new", overwrite=True)
    assert (tmp_path / "x/sub/a.txt").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_every_file_and_folder_is_flushed_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[tuple[str, bool]] = []
    real = atomic._fsync

    def record(path: Path) -> None:
        flushed.append((path.name, (tmp_path / "x").exists()))
        real(path)

    monkeypatch.setattr(atomic, "_fsync", record)
    save(tmp_path / "x", "data")
    names = [name for name, _ in flushed]
    assert {"a.txt", "sub", MANIFEST_FILE} <= set(names)
    assert [exists for _, exists in flushed] == [False] * (len(flushed) - 1) + [True]
    assert names[-1] == tmp_path.name


def test_what_a_kill_between_the_renames_moved_aside_is_put_back(tmp_path: Path) -> None:
    save(tmp_path / "x", "old")
    (tmp_path / "x").rename(tmp_path / ".x.old-0a1b")
    atomic.restore_interrupted(tmp_path)
    assert (tmp_path / "x/sub/a.txt").read_text() == "old"


def test_bytes_are_replaced_in_one_step(tmp_path: Path) -> None:
    atomic_write_bytes(tmp_path / "f", b"one")
    atomic_write_bytes(tmp_path / "f", b"two")
    assert (tmp_path / "f").read_bytes() == b"two"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_failed_write_keeps_the_earlier_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    atomic_write_bytes(tmp_path / "f", b"one")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"No space left"):
        atomic_write_bytes(tmp_path / "f", b"two")
    assert (tmp_path / "f").read_bytes() == b"one"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_json_refuses_nan_and_keeps_the_earlier_file(tmp_path: Path) -> None:
    atomic_write_json(tmp_path / "f.json", {"b": 1, "a": [2]})
    with pytest.raises(ValueError, match=r"JSON"):
        atomic_write_json(tmp_path / "f.json", {"a": float("nan")})
    assert json.loads((tmp_path / "f.json").read_text()) == {"a": [2], "b": 1}


def test_removal_never_leaves_a_part_under_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "x", "old")

    def interrupted(path: Path, **_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic.shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        atomic.remove_folder(tmp_path / "x")
    monkeypatch.undo()
    assert not (tmp_path / "x").exists()
    atomic.sweep_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "no manifest", "garbled manifest"])
def test_a_damaged_folder_fails_its_manifest(tmp_path: Path, damage: str) -> None:
    save(tmp_path / "x", "hello")
    file, manifest = tmp_path / "x/sub/a.txt", tmp_path / "x" / MANIFEST_FILE
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_text("hell")
    elif damage == "flipped":
        file.write_text("jello")
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text('{"files": ')
    with pytest.raises(CheckpointError, match=r"sub/a\.txt|manifest"):
        check_manifest(tmp_path / "x")


def test_a_size_check_alone_skips_the_hashes(tmp_path: Path) -> None:
    save(tmp_path / "x", "hello")
    (tmp_path / "x/sub/a.txt").write_text("jello")
    check_manifest(tmp_path / "x", hashes=False)
