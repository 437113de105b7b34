"""The groups of `validation/gpu_tests.py`: none is forgotten, none ends unseen, none stays."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = runpy.run_path(str(ROOT / "validation" / "gpu_tests.py"))
REPORT = (
    '<testsuites><testsuite><testcase name="test_a" /><testcase name="test_b" /></testsuite></testsuites>'
)
# Starts a child, names it, and waits for longer than any test.
PARENT = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""


def test_every_file_with_gpu_tests_belongs_to_a_group() -> None:
    grouped = {given.partition("::")[0] for chosen in SCRIPT["GROUPS"].values() for given in chosen}
    marked = {
        str(path.relative_to(ROOT))
        for path in ROOT.glob("packages/*/tests/test_*.py")
        if "pytest.mark.gpu" in path.read_text(encoding="utf-8")
    }
    assert marked
    assert marked <= grouped
    assert all((ROOT / path).is_file() for path in grouped)


def test_a_group_that_takes_too_long_is_ended_with_its_children() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        assert SCRIPT["finish"](process, 0.1) is None
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_group_whose_tests_passed_but_that_ended_with_an_error_has_failed(tmp_path: Path) -> None:
    (tmp_path / "parts.xml").write_text(REPORT)
    assert SCRIPT["read"]("parts", tmp_path, 0) == {"passed": 2, "failed": {}, "skipped": 0}
    found = SCRIPT["read"]("parts", tmp_path, 3)
    assert found == {"passed": 2, "failed": {"parts": "exit code 3"}, "skipped": 0}


def test_a_group_without_a_report_has_failed(tmp_path: Path) -> None:
    assert SCRIPT["read"]("parts", tmp_path, None)["failed"] == {"parts": "did not finish"}
    assert SCRIPT["read"]("parts", tmp_path, 2)["failed"] == {"parts": "exit code 2 and no report"}
