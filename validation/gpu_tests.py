"""Run the GPU tier of test groups side by side and write one receipt: what passed, what failed, what was left out.

Run on a GPU machine, from the repository's root:

    python validation/gpu_tests.py --output validation/receipts

Exit code 0 means that every group that was asked for ran, passed, and skipped nothing; the receipt names the groups.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import torch

from poros.parity.receipts import write_receipt

QWEN, GEMMA = (
    "packages/poros-arch-qwen/tests/test_parity.py",
    "packages/poros-arch-gemma/tests/test_parity.py",
)
# Group -> what pytest is given. An architecture's gates are a class of its package's test_parity.py.
GROUPS = {
    "qwen2": (f"{QWEN}::TestQwen2",),
    "qwen3": (f"{QWEN}::TestQwen3",),
    "qwen3_5": (f"{QWEN}::TestQwen3_5",),
    "gemma3": (f"{GEMMA}::TestGemma3",),
    "gemma4": (f"{GEMMA}::TestGemma4",),
    "runs": (
        "packages/poros-core/tests/test_run_gpu.py",
        "packages/poros-core/tests/test_every_plan.py",
        "packages/poros-core/tests/test_verify_sides.py",
        "packages/poros-core/tests/test_engine_steps.py",
        "packages/poros-core/tests/test_engine_randomness.py",
        "packages/poros-cli/tests/test_train_command.py",
        "packages/poros-cli/tests/test_cli_doctor.py",
    ),
    "parts": (
        "packages/poros-quant/tests/test_nf4_kernel.py",
        "packages/poros-core/tests/test_engine_loss_kernel.py",
        "packages/poros-core/tests/test_engine_packing.py",
        "packages/poros-core/tests/test_blocks_disk_gpu.py",
        "packages/poros-core/tests/test_neftune.py",
        "packages/poros-core/tests/test_optimizer_8bit.py",
        "packages/poros-core/tests/test_torch_module_gpu.py",
    ),
    "full-card": ("packages/poros-core/tests/test_starvation_gpu.py",),
}
# Takes all memory of the card, so nothing else may run beside it: it comes last.
ALONE = "full-card"
ALONE_SECONDS = 90.0  # kept for it

MAX_REASON = 600


def start(group: str, folder: Path) -> subprocess.Popen[str]:
    """Start pytest on a group; its report goes to ``folder``."""
    arguments = ("--tier", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={folder / group}.xml")
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *arguments, *GROUPS[group]],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], seconds: float) -> int | None:
    """Wait for a group and return its exit code; None where it took longer and was ended with all its children.

    A child that stayed would keep memory of the card.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(max(0.0, seconds))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return None


def read(group: str, folder: Path, code: int | None) -> dict[str, Any]:
    """Return the counts of a group that ended with ``code`` and the names of what failed; zero without a report."""
    report = folder / f"{group}.xml"
    if code is None or not report.exists():
        reason = "did not finish" if code is None else f"exit code {code} and no report"
        return {"passed": 0, "failed": {group: reason}, "skipped": 0}
    cases = list(ET.parse(report).getroot().iter("testcase"))
    failed = {str(c.get("name")): reason for c in cases if (reason := _reason(c)) is not None}
    skipped = sum(c.find("skipped") is not None for c in cases)
    passed = len(cases) - len(failed) - skipped
    if code != 0 and not failed:  # something outside of the tests
        failed[group] = f"exit code {code}"
    return {"passed": passed, "failed": failed, "skipped": skipped}


def _reason(case: ET.Element) -> str | None:
    """Return what a failed test raised, None where it did not fail."""
    for tag in ("failure", "error"):
        if (found := case.find(tag)) is not None:
            return str(found.get("message"))[:MAX_REASON]
    return None


def main() -> int:
    """Run the groups, write the receipt, print it last."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", default=list(GROUPS))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=540, help="for everything (default: 540)")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    beside = [group for group in arguments.groups if group != ALONE]
    alone = [ALONE] if ALONE in arguments.groups else []
    rounds = ((beside, deadline - ALONE_SECONDS if alone else deadline), (alone, deadline))
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for together, until in rounds:
            running = {group: start(group, folder) for group in together}
            for group, process in running.items():
                code = finish(process, until - time.monotonic())
                results[group] = read(group, folder, code)
                print(f"== {group}: {results[group]}", flush=True)
    measured = {
        "claim": "tests",
        "tier": "gpu",
        "groups": {g: GROUPS[g] for g in results},
        "results": results,
    }
    write_receipt(arguments.output / "tests-gpu.json", torch.device("cuda"), measured)
    good = all(r["passed"] and not r["failed"] and not r["skipped"] for r in results.values())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
