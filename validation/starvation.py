"""Take memory, folders and the cache away from training runs: they finish with the same bits or refuse.

    python validation/starvation.py --output validation/receipts

Forked runs of a tiny `poros train` get a limit on their memory (``ulimit -v``, ``-d``, a real control group where one
may be made), a cache that cannot be written to, a cache that another run is writing at the same time, and an output
folder that another run is using. None may be killed, and none may end with a traceback. A CPU run locks no memory:
refused locks are in the GPU tests.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from crashes import evidence, leftovers
from tiny_run import Child, Ended, Fault, prepare, start

import poros.run.trainer as trainer_module
from poros.parity.receipts import write_receipt

MB = 10**6
# Above what the process has when the limit is set.
PROCESS_LIMITS = (10 * MB, 30 * MB, 60 * MB, 120 * MB, 250 * MB, 500 * MB, 1000 * MB)
# Above what the control group uses when the run is planned.
GROUP_LIMITS = tuple(MB * size for size in (30, 100, 200, 280, 300, 350, 400, 600))
GROUPS = Path("/sys/fs/cgroup/memory/poros-starvation"), Path("/sys/fs/cgroup/poros-starvation")
# Of a group of version 1 and 2: the file of its limit, and that of its use.
USE = {"memory.limit_in_bytes": "memory.usage_in_bytes", "memory.max": "memory.current"}
PAUSE_SECONDS = 0.5


def main(arguments: Sequence[str] | None = None) -> None:
    """Starve, compare, write the receipt, and fail where something does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("validation/receipts"))
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs that share a cache")
    chosen = parser.parse_args(arguments)
    begun, found, broken = time.monotonic(), {}, []
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        prepare(home)
        assert start(home, home / "whole").code == 0
        expected = evidence(home / "whole" / "output")
        parts: dict[str, Callable[[Path, Path, dict[str, Any]], Any]] = {
            **{f"pair {number}": two_runs_one_cache for number in range(chosen.pairs)},
            "output in use": output_in_use,
            "read-only cache": read_only_cache,
            "ulimit -v": lambda *rest: process_limits(*rest, kind=resource.RLIMIT_AS),
            "ulimit -d": lambda *rest: process_limits(*rest, kind=resource.RLIMIT_DATA),
            "control group": control_group_limits,
        }
        for part, try_it in parts.items():
            folder = home / part.replace(" ", "_")
            try:
                found[part] = try_it(home, folder, expected)
            except AssertionError as error:
                found[part] = "broken"
                broken.append(f"{part}: {error}")
            print(part, found[part], broken[-1:], flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    measured = {**found, "broken": broken, "seconds": round(time.monotonic() - begun, 1)}
    write_receipt(chosen.output / "starvation.json", torch.device("cpu"), {"measured": measured})
    print(json.dumps(measured, indent=2))
    if broken:
        raise SystemExit(f"{len(broken)} do not hold.")


def two_runs_one_cache(home: Path, folder: Path, expected: dict[str, Any]) -> str:
    """Start two runs at once that both make the caches; both must finish with the same bits."""
    shared = ("--set", f"cache_dir={folder / 'cache'}")
    with ExitStack() as running:
        children = {
            name: running.enter_context(Child(home, folder / name, shared, Fault(), False))
            for name in ("a", "b")
        }
        for name, child in children.items():
            ended = child.wait()
            assert ended.code == 0, ended.shown
            check_equal(folder / name / "output", expected)
    assert not leftovers(folder)
    return "both equal"


def output_in_use(home: Path, folder: Path, expected: dict[str, Any]) -> str:
    """Start runs in the folder of a running one; they must be refused, and the first must finish with the same bits."""
    refused = []
    with Child(home, folder, (), Fault(before=_slow_steps), False) as first:
        metrics = folder / "output" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not metrics.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        for how in ("--resume", "--overwrite"):
            # A folder of its own for the log; the output is the first one's.
            ended = start(home, folder.with_name(folder.name + how), how, "--output", str(folder / "output"))
            refused.append(ended)
        done = first.wait()
    assert done.code == 0, done.shown
    for ended in refused:
        assert ended.code == 2, ended.shown
    assert any("is in use" in ended.shown for ended in refused), [ended.shown for ended in refused]
    check_equal(folder / "output", expected)
    return "both refused, the first equal"


def read_only_cache(home: Path, folder: Path, expected: dict[str, Any]) -> str:
    """Train with a cache folder on a file system that cannot be written to."""
    cache = folder / "cache"
    cache.mkdir(parents=True)
    with _read_only(cache) as how:
        ended = start(home, folder)
        assert ended.code == 0, ended.shown
        assert "Cannot keep tokenized rows" in ended.shown, ended.shown
        assert "The quantized store is not cached" in ended.shown, ended.shown
        check_equal(folder / "output", expected)
    return f"two warnings, equal ({how})"


def process_limits(home: Path, folder: Path, expected: dict[str, Any], *, kind: int) -> dict[str, str]:
    """Train under limits on the process's memory; a run must finish with the same bits or refuse."""
    return _both_ways(
        {
            f"{size // MB} MB more": under_process_limit(home, folder / str(size), expected, kind, size)
            for size in PROCESS_LIMITS
        }
    )


def under_process_limit(
    home: Path, folder: Path, expected: dict[str, Any], kind: int, more_bytes: int
) -> str:
    """Train where the process may take ``more_bytes`` beyond what it has; return what it did."""
    return _finished_or_refused(home, folder, expected, partial(_limit_process, kind, more_bytes))


def control_group_limits(home: Path, folder: Path, expected: dict[str, Any]) -> dict[str, str] | str:
    """Train inside a control group with a memory limit; a run must finish with the same bits or refuse."""
    answers = {}
    for size in GROUP_LIMITS:
        with _control_group(size) as join:
            if join is None:
                return "not permitted here"
            answers[f"{size // MB} MB more"] = _finished_or_refused(home, folder / str(size), expected, join)
    return _both_ways(answers)


def check_equal(output: Path, expected: dict[str, Any]) -> None:
    """Compare a finished run.

    Raises:
        AssertionError: naming what differs.
    """
    found = evidence(output)
    assert not (names := [name for name, value in expected.items() if found[name] != value]), (
        f"{names} differ"
    )


def _finished_or_refused(
    home: Path, folder: Path, expected: dict[str, Any], before: Callable[[], None]
) -> str:
    """Return ``equal``, ``refused`` before anything was taken, or ``ran out`` where an allocation failed and was told.

    The latter happens where threads start after memory was counted: the C library reserves address space for each.
    """
    ended: Ended = start(home, folder, fault=Fault(before=before, predicts=True))
    assert ended.code in (0, 2), f"{ended.code}: {ended.shown}"
    if ended.code == 2:
        assert "memory" in ended.shown, ended.shown
        return "ran out" if "memory ran out" in ended.shown else "refused"
    check_equal(folder / "output", expected)
    return "equal"


def _both_ways(answers: dict[str, str]) -> dict[str, str]:
    """Return the answers of limits in ascending order: too little must be refused, enough must do."""
    found = list(answers.values())
    assert found[0] == "refused", answers
    assert found[-1] == "equal", answers
    return answers


def _limit_process(kind: int, more_bytes: int) -> None:
    memory = psutil.Process().memory_info()
    used = memory.vms if kind == resource.RLIMIT_AS else memory.data
    resource.setrlimit(kind, (used + more_bytes, used + more_bytes))


def _slow_steps() -> None:
    original = trainer_module.Trainer._train_step

    def slow(*arguments: Any, **options: Any) -> None:
        original(*arguments, **options)
        time.sleep(PAUSE_SECONDS)

    trainer_module.Trainer._train_step = slow  # type: ignore[method-assign]


@contextmanager
def _read_only(folder: Path) -> Iterator[str]:
    """Make a folder that cannot be written to, for root too where a file system may be mounted."""
    if os.geteuid() != 0:
        folder.chmod(0o500)
        yield "permissions"
        folder.chmod(0o700)
        return
    command = ("mount", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", str(folder))
    subprocess.run(command, check=True)
    try:
        yield "read-only mount"
    finally:
        subprocess.run(("umount", str(folder)), check=True)


@contextmanager
def _control_group(limit_bytes: int) -> Iterator[Callable[[], None] | None]:
    """Make a control group of version 1 or 2; yield what joins it, or None where that is not permitted."""
    for group, limit in zip(GROUPS, USE, strict=True):
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            yield partial(_join, group, limit, limit_bytes)
        finally:
            group.rmdir()
        return
    yield None


def _join(group: Path, limit: str, more_bytes: int) -> None:
    """Enter the group now, and set its limit when the run is planned: by then the process itself is there."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    original = trainer_module.plan_run

    def plan_run(*arguments: Any) -> Any:
        used = int((group / USE[limit]).read_text())
        (group / limit).write_text(str(used + more_bytes))
        return original(*arguments)

    trainer_module.plan_run = plan_run


if __name__ == "__main__":
    main()
