"""Checkpoints of a run: complete or not there, newest complete first, nothing pickled."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from poros.checkpoint import load_run_state, newest_complete, prune, run_state, save_run_state
from poros.errors import CheckpointError, NonFiniteError, OutputError

META = {"data": {"position": 5}, "rng": [1, 2**63], "lr": 1e-4}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    bank = torch.randn(12)
    return {
        "bank.a": bank[:4],  # views of one storage, as a flat bank gives them
        "bank.b": bank[4:].view(2, 4).t(),
        "moment": torch.randn(3).to(torch.bfloat16),
        "generator": torch.get_rng_state(),
        "count": torch.tensor(7),
        "negative zero": torch.tensor([-0.0]),
    }


def saved_steps(run_folder: Path) -> list[str]:
    return sorted(path.name for path in (run_folder / "checkpoints").iterdir())


def test_a_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = save_run_state(tmp_path, 5, tensors(), META)
    assert path == tmp_path / "checkpoints" / "step-000005"
    state = load_run_state(path)
    assert state.step == 5
    assert state.meta == META
    for name, tensor in tensors().items():
        got = state.tensors[name]
        assert got.dtype == tensor.dtype
        assert torch.equal(got, tensor)
    assert torch.signbit(state.tensors["negative zero"]).all()


def test_a_checkpoint_holds_safetensors_and_json_only(tmp_path: Path) -> None:
    path = save_run_state(tmp_path, 5, tensors(), META)
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}


def test_loaded_tensors_can_be_changed_without_touching_the_checkpoint(tmp_path: Path) -> None:
    path = save_run_state(tmp_path, 5, tensors(), META)
    load_run_state(path).tensors["moment"].zero_()
    assert torch.equal(load_run_state(path).tensors["moment"], tensors()["moment"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_tensor_that_is_not_finite_is_refused_by_name(tmp_path: Path, value: float) -> None:
    save_run_state(tmp_path, 4, tensors(), META)
    bad = tensors() | {"lora_B.3": torch.tensor([0.0, value, value])}
    with pytest.raises(NonFiniteError, match=r"step 5.*2 of 3 NaN or infinite \(tensor `lora_B\.3`\)"):
        save_run_state(tmp_path, 5, bad, META)
    assert saved_steps(tmp_path) == ["step-000004"]


def test_meta_that_json_cannot_hold_saves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"JSON"):
        save_run_state(tmp_path, 5, tensors(), {"loss": float("nan")})
    assert saved_steps(tmp_path) == []


def test_a_full_disk_keeps_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_run_state(tmp_path, 4, tensors(), META)

    def full(path: Path, *_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_state, "save_tensors", full)
    with pytest.raises(OutputError, match=r"step-000005.*No space left"):
        save_run_state(tmp_path, 5, tensors(), META)
    assert saved_steps(tmp_path) == ["step-000004"]
    assert newest_complete(tmp_path) == (tmp_path / "checkpoints/step-000004", [])


def test_a_step_is_replaced_when_a_resumed_run_reaches_it_again(tmp_path: Path) -> None:
    save_run_state(tmp_path, 5, tensors(0), META)
    path = save_run_state(tmp_path, 5, tensors(1), META)
    assert torch.equal(load_run_state(path).tensors["moment"], tensors(1)["moment"])
    assert saved_steps(tmp_path) == ["step-000005"]


def test_the_newest_step_is_chosen_by_number(tmp_path: Path) -> None:
    for step in (2, 1_000_000, 999_999):
        save_run_state(tmp_path, step, tensors(), META)
    (tmp_path / "checkpoints" / "notes").mkdir()
    assert newest_complete(tmp_path) == (tmp_path / "checkpoints/step-1000000", [])


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert newest_complete(tmp_path) == (None, [])


@pytest.mark.parametrize("damage", ["delete", "truncate", "flip", "no manifest"])
def test_a_damaged_newest_checkpoint_is_skipped_and_named(tmp_path: Path, damage: str) -> None:
    good = save_run_state(tmp_path, 5, tensors(), META)
    bad = save_run_state(tmp_path, 6, tensors(), META)
    file = bad / "state.safetensors"
    content = file.read_bytes()
    if damage == "delete":
        file.unlink()
    elif damage == "truncate":
        file.write_bytes(content[:-1])
    elif damage == "flip":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        (bad / "manifest.json").unlink()
    path, skipped = newest_complete(tmp_path)
    assert path == good
    assert [folder for folder, _ in skipped] == [bad]
    assert "state.safetensors" in skipped[0][1] or "did not finish" in skipped[0][1]
    with pytest.raises(CheckpointError, match=r"Incomplete or damaged"):
        load_run_state(bad)


def test_only_damaged_checkpoints_leave_none(tmp_path: Path) -> None:
    for step in (1, 2):
        (save_run_state(tmp_path, step, tensors(), META) / "state.json").unlink()
    path, skipped = newest_complete(tmp_path)
    assert path is None
    assert [folder.name for folder, _ in skipped] == ["step-000002", "step-000001"]


def test_prune_keeps_the_newest_complete_ones(tmp_path: Path) -> None:
    paths = [save_run_state(tmp_path, step, tensors(), META) for step in (1, 2, 3, 4)]
    assert prune(tmp_path, 2) == [paths[1], paths[0]]
    assert saved_steps(tmp_path) == ["step-000003", "step-000004"]


def test_prune_does_not_count_a_damaged_checkpoint_as_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_run_state(tmp_path, step, tensors(), META)
    (tmp_path / "checkpoints/step-000003/state.json").unlink()
    prune(tmp_path, 1)
    assert saved_steps(tmp_path) == ["step-000002", "step-000003"]
    assert newest_complete(tmp_path)[0] == tmp_path / "checkpoints/step-000002"


def test_prune_counts_no_checkpoint_beyond_the_one_that_the_run_went_on_from(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save_run_state(tmp_path, step, tensors(), META)
    damaged = tmp_path / "checkpoints" / "step-000006" / "state.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1  # of the same size: only its hash tells
    damaged.write_bytes(content)
    assert newest_complete(tmp_path)[0] == tmp_path / "checkpoints" / "step-000004"
    assert prune(tmp_path, keep=1, newest=4) == [tmp_path / "checkpoints" / "step-000002"]
    assert saved_steps(tmp_path) == ["step-000004", "step-000006"]


def test_prune_removes_what_a_killed_save_left(tmp_path: Path) -> None:
    save_run_state(tmp_path, 1, tensors(), META)
    (tmp_path / "checkpoints" / ".step-000002.tmp-0a1b").mkdir()
    prune(tmp_path, 3)
    assert saved_steps(tmp_path) == ["step-000001"]


def test_prune_never_keeps_zero(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"1 or more"):
        prune(tmp_path, 0)


def test_a_folder_of_another_kind_is_no_checkpoint(tmp_path: Path) -> None:
    from poros.checkpoint import atomic_folder

    with atomic_folder(tmp_path / "x") as folder:
        (folder / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"Not a run checkpoint"):
        load_run_state(tmp_path / "x")


KILLED = """
import os, shutil, sys, warnings
from pathlib import Path
import torch
from poros.checkpoint import load_run_state, newest_complete, prune, save_run_state

warnings.simplefilter("ignore")  # fork in a process with threads: the child only writes files and exits
root = Path(sys.argv[1])
EVENTS = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "open"}


def cycle(folder):
    save_run_state(folder, 4, {"w": torch.full((4,), 40.0)}, {})  # replaces the one that is there
    save_run_state(folder, 5, {"w": torch.full((4,), 5.0)}, {})
    prune(folder, 1)


point = 0
while True:
    folder = root / str(point)
    save_run_state(folder, 4, {"w": torch.full((4,), 4.0)}, {})
    pid = os.fork()
    if pid == 0:
        left = point

        def kill(event, arguments):
            global left
            if event in EVENTS:
                if left == 0:
                    os.kill(os.getpid(), 9)
                left -= 1

        sys.addaudithook(kill)
        cycle(folder)
        os._exit(0)
    killed = os.waitpid(pid, 0)[1] != 0
    path, skipped = newest_complete(folder)
    assert path is not None and not skipped, (point, path, skipped)
    state = load_run_state(path)
    assert state.tensors["w"].tolist() in ([4.0] * 4, [40.0] * 4, [5.0] * 4), (point, state)
    if killed:
        cycle(folder)  # the next run goes on and cleans up
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step-000005"], point
    shutil.rmtree(folder)
    if not killed:
        break
    point += 1
print(point)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has neither fork nor SIGKILL")
def test_a_kill_at_any_point_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 20


def test_a_checkpoint_that_a_kill_moved_aside_is_found(tmp_path: Path) -> None:
    path = save_run_state(tmp_path, 4, tensors(), META)
    path.rename(path.parent / ".step-000004.old-0a1b")
    assert newest_complete(tmp_path) == (path, [])
