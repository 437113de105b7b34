"""The short form of `nox -s garbage`, its controls, and the receipt on record."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

VALIDATION = Path(__file__).resolve().parents[3] / "validation"
NUM_INPUTS = 300


@pytest.fixture
def garbage(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(VALIDATION))
    return importlib.import_module


def test_three_hundred_damaged_inputs_work_or_are_refused(tmp_path: Path) -> None:
    # A process of its own: an audit hook stays, and so does a limit of the address space.
    command = [sys.executable, str(VALIDATION / "run_garbage.py"), "--inputs", str(NUM_INPUTS), "--seed", "7"]
    done = subprocess.run([*command, "--output", str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    measured = json.loads((tmp_path / "garbage.json").read_text())
    assert measured["num_inputs"] >= NUM_INPUTS
    assert measured["works"] > 0 < measured["refused"]
    assert (measured["files_changed_outside"], measured["code_executed"]) == (0, 0)


# What each control does, run in a process of its own, and what the guard must say of it.
CONTROLS = {
    "a file outside": ("open('../outside', 'w')", "open of"),
    "a folder outside": ("os.mkdir('../outside-folder')", "os.mkdir of"),
    "a file renamed away": ("os.rename('input', '../moved')", "os.rename of"),
    "a process": ("subprocess.run(['true'])", "subprocess.Popen"),
    "a shell": ("os.system('true')", "os.system"),
    "a pickle": ("pickle.loads(b'cos\\nsystem\\n(S\"true\"\\ntR.')", "pickle.find_class"),
    "a connection": ("socket.create_connection(('127.0.0.1', 9), 0.1)", "socket.connect"),
    "a canary": ("open('executed.canary', 'w')", "executed"),
    "no end": ("any(0 for _ in iter(int, 1))", "more than 0.2 s of CPU"),
    "waiting without end": ("time.sleep(60)", "s of waiting"),
    "a traceback": ("{}['x']", "KeyError"),
    "an allocation": ("bytes(2**40)", "an allocation"),
    "an allocation in another error": ("refuse('MemoryError')", "an allocation"),
}
SCRIPT = """
import os, pickle, socket, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {validation!r})
from garbage.guard import Guard, limit_memory
class UserError(Exception):
    exit_code = 2
def refuse(text):
    raise UserError(text)
folder = Path({folder!r})
os.chdir(folder)
Path("input").write_text("x")
limit_memory()
for line, allowed in {uses!r}:
    guard = Guard(allowed=(folder,) if allowed else (folder / "out",), inputs=folder, seconds=0.2)
    print(guard.judge(lambda: eval(line)))
"""


def test_the_guard_catches_what_must_not_happen(tmp_path: Path) -> None:
    folder = tmp_path / "input"
    folder.mkdir()
    # Only the canary lies where writing is allowed.
    uses = [(line, name == "a canary") for name, (line, _) in CONTROLS.items()]
    uses += [("refuse('no')", False), ("1", False)]
    script = SCRIPT.format(validation=str(VALIDATION), folder=str(folder), uses=uses)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert len(lines) == len(uses), done.stderr
    for (name, (_, words)), line in zip(CONTROLS.items(), lines, strict=False):
        assert "kind='bug'" in line, name
        assert words in line, name
    assert "kind='refused'" in lines[-2]
    assert "kind='works'" in lines[-1]


def test_the_same_seed_damages_alike(garbage: Any) -> None:
    mutate = garbage("garbage.mutate")
    tree = {"a": [1, {"b": "c"}], "d": None}
    drawn = [[mutate.mutate_json(Random(f"{seed}"), tree) for seed in range(50)] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 40
    assert tree == {"a": [1, {"b": "c"}], "d": None}


def test_the_receipt_on_record_holds() -> None:
    receipt = json.loads((VALIDATION / "receipts" / "garbage.json").read_text())
    assert receipt["num_inputs"] >= 5000
    assert receipt["bugs"] == []
    assert receipt["works"] + receipt["refused"] == receipt["num_inputs"]
    assert (receipt["files_changed_outside"], receipt["code_executed"]) == (0, 0)
    assert receipt["slowest_cpu_seconds"] < receipt["cpu_seconds_per_input"]
