"""One run at a time in an output folder; leftovers of killed processes are told from work in progress."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import poros
from poros.checkpoint.atomic import sweep_abandoned
from poros.checkpoint.folder_lock import abandoned, folder_lock
from poros.errors import OutputError

pytest.importorskip("fcntl")
Make = Callable[..., poros.Trainer]


def old(path: Path) -> Path:
    """Make a folder with a file that nobody has touched for long."""
    path.mkdir(parents=True)
    (path / "file").write_text("x")
    os.utime(path, (0, 0))
    return path


def test_a_lock_is_held_once_leaves_no_file_and_ends_with_its_block(tmp_path: Path) -> None:
    with folder_lock(tmp_path) as first, folder_lock(tmp_path) as second:
        assert (first, second) == (True, False)
    assert abandoned(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with folder_lock(tmp_path):
            os.write(writing, b"x")
            signal.pause()
    assert os.read(reading, 1) == b"x"
    assert not abandoned(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert abandoned(tmp_path)


def test_a_file_system_without_locks_refuses_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(45, "not supported")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with folder_lock(tmp_path) as locked:
        assert locked is None
    assert not abandoned(tmp_path)


class SecondRun(poros.Reporter):
    """Starts another run in the same folder while this one trains."""

    def __init__(self, make: Callable[[], poros.Trainer]) -> None:
        self.make, self.refused = make, ""

    def on_start(self, event: poros.run.StartEvent) -> None:
        try:
            self.make()
        except OutputError as error:
            self.refused = str(error)


@pytest.mark.parametrize("how", ["resume", "overwrite"])
def test_a_second_run_in_the_folder_of_a_running_one_is_refused_and_the_first_goes_on(
    make_trainer: Make, make_steps: Callable[..., object], tmp_path: Path, how: str
) -> None:
    second = SecondRun(lambda: make_trainer(tmp_path, **{how: True}))
    with make_trainer(tmp_path, steps=make_steps(epochs=1), reporters=(second,)) as trainer:
        assert trainer.run().steps == 6
    assert "The output folder is in use: expected a folder that no run is writing to" in second.refused
    assert "Wait for that run, end it, or name another `--output`" in second.refused


def test_two_trainers_that_were_made_at_once_do_not_run_at_once(make_trainer: Make, tmp_path: Path) -> None:
    first, second = make_trainer(tmp_path), make_trainer(tmp_path, overwrite=True)
    with folder_lock(first.output), pytest.raises(OutputError, match="is in use"):
        second.run()


def test_abandoned_folders_are_swept_and_those_in_use_young_or_needed_stay(tmp_path: Path) -> None:
    dead, busy = old(tmp_path / ".a.tmp-1"), old(tmp_path / ".b.tmp-2")
    young = tmp_path / ".c.tmp-3"
    young.mkdir()
    gone, replaced, only_copy = (old(tmp_path / name) for name in (".d.gone-4", ".e.old-5", ".f.old-6"))
    (tmp_path / "e").mkdir()
    with folder_lock(busy):
        sweep_abandoned(tmp_path)
    assert [path.exists() for path in (dead, busy, young)] == [False, True, True]
    assert [path.exists() for path in (gone, replaced, only_copy)] == [False, False, True]


def test_sweeping_a_folder_that_is_not_there_does_nothing(tmp_path: Path) -> None:
    sweep_abandoned(tmp_path / "none")
    assert not list(tmp_path.iterdir())
