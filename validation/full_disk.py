"""Fill the disk at every write of a training run, and go on once there is space again: nothing is lost; one receipt.

    python validation/full_disk.py --output validation/receipts --every 1

A tiny `poros train` gets ENOSPC at its n-th write, opened file or new folder and at each one after it, for every n.
Where a tmpfs may be mounted, real ones are filled up to a few bytes before a save as well. Caches that cannot be
written to cost a warning; anything else ends the run with one message, exit code 2 and what was saved before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from crashes import evidence, leftovers
from file_faults import GROWING, area_of, cache_full, disk_full
from tiny_run import Fault, prepare, start

import poros.run.trainer as trainer_module
from poros.checkpoint import newest_complete
from poros.parity.receipts import write_receipt

CACHES = ("rows cache", "store cache")
TMPFS_BYTES = 8 * 2**20
FILLER = "filler"
FULL = ("No space left on device", "Not enough disk space")


@dataclass
class Tally:
    """What was found; ``broken`` says what does not hold."""

    full: int = 0
    areas: Counter[str] = field(default_factory=Counter)
    finished_with_a_warning: int = 0
    stopped_with_a_message: int = 0
    equal: int = 0
    tmpfs_full: int = 0
    tmpfs_with_room: int = 0
    bytes_lost: int = 0
    broken: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill, look, go on, compare, write the receipt, and fail where something does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("validation/receipts"))
    parser.add_argument("--every", type=int, default=1, help="take every n-th write")
    parser.add_argument("--tmpfs", type=int, default=12, help="real file systems to fill")
    chosen = parser.parse_args(arguments)
    begun, tally = time.monotonic(), Tally()
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        prepare(home)
        whole = start(home, home / "whole", count=True)
        assert whole.code == 0, whole.shown
        expected = evidence(home / "whole" / "output")
        points = [number for number, call in enumerate(whole.calls) if call[0] in GROWING]
        for number in points[:: chosen.every]:
            trial = home / f"trial-{number}"
            alone = [cache_full] if area_of(whole.calls[number]) in CACHES else []
            for act in (disk_full, *alone):
                _guarded(f"write {number}", tally, home, trial, Fault(at=number, act=act), expected)
                shutil.rmtree(trial, ignore_errors=True)
        draw = random.Random(0)
        for number in range(chosen.tmpfs):
            with _tmpfs(home / f"small-{number}") as mounted:
                if not mounted:
                    break
                trial = home / f"small-{number}" / "trial"
                left, save = draw.randrange(0, 60_000), draw.randrange(3)
                fault = Fault(before=partial(_fill_before, trial, left, save))
                _guarded(f"tmpfs, {left} bytes left before save {save}", tally, home, trial, fault, expected)
    found = {**tally.__dict__, "areas": dict(tally.areas), "seconds": round(time.monotonic() - begun, 1)}
    write_receipt(chosen.output / "full-disk.json", torch.device("cpu"), {"measured": found})
    print(json.dumps(found, indent=2))
    if tally.broken:
        raise SystemExit(f"{len(tally.broken)} of {tally.full} do not hold.")


def _guarded(
    what: str, tally: Tally, home: Path, trial: Path, fault: Fault, expected: dict[str, Any]
) -> None:
    try:
        fill_and_go_on(tally, home, trial, fault, expected)
    except AssertionError as error:
        tally.broken.append(f"{what}: {error}")
    print(f"{what}: {tally.full} {tally.broken[-1:]}", flush=True)


def fill_and_go_on(tally: Tally, home: Path, trial: Path, fault: Fault, expected: dict[str, Any]) -> None:
    """Run one trial.

    Raises:
        AssertionError: something does not hold.
    """
    output = trial / "output"
    ended = start(home, trial, fault=fault)
    assert not any(word in ended.shown for word in ("Traceback", "Unexpected error")), ended.shown
    was_full = ended.hit is not None or any(words in ended.shown for words in FULL)
    tally.full += was_full
    if ended.hit is not None:
        tally.areas[ended.hit[0]] += 1
    elif was_full:
        tally.areas["a real file system"] += 1
        tally.tmpfs_full += 1
    else:
        assert fault.before is not None, "the disk was never full"
        assert ended.code == 0, ended.shown
        tally.tmpfs_with_room += 1
    if ended.code == 0:
        if ended.hit is not None:
            assert ended.hit[0] in CACHES, f"a full disk in {ended.hit} went unnoticed"
            assert any(words in ended.shown for words in FULL), ended.shown
        tally.finished_with_a_warning += was_full
    else:
        assert ended.code == 2, ended.shown
        assert any(words in ended.shown for words in FULL), ended.shown
        tally.stopped_with_a_message += 1
    assert not (left := leftovers(trial)), f"half a file is left: {left}"
    newest, skipped = newest_complete(output)
    done = 0 if newest is None else int(newest.name.removeprefix("step-"))
    if skipped or done < max(ended.saved, default=0):
        tally.bytes_lost += sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
        raise AssertionError(f"saved {ended.saved}, found {newest}, skipped {skipped}")
    (trial / FILLER).unlink(missing_ok=True)
    if ended.code != 0:
        # An output that nobody could make is new.
        used = output.is_dir() and any(output.iterdir())
        more = ("--resume",) if newest is not None else ("--overwrite",) if used else ()
        last = start(home, trial, *more)
        assert last.code == 0, last.shown
    found = evidence(output)
    for name, value in expected.items():
        assert found[name] == value, f"{name} differ"
    tally.equal += was_full


def _fill_before(trial: Path, left: int, save: int) -> None:
    """Fill the file system of ``trial`` up to ``left`` bytes before save number ``save``; runs in the child."""
    original, seen = trainer_module.save_state, []

    def filled(*arguments: Any) -> Path:
        if len(seen) == save:
            free = shutil.disk_usage(trial).free
            with (trial / FILLER).open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, free - left))
        seen.append(arguments[1])
        return original(*arguments)

    trainer_module.save_state = filled


@contextmanager
def _tmpfs(folder: Path) -> Iterator[bool]:
    """Mount a small file system for the block; yield whether that is permitted."""
    folder.mkdir()
    command = ("mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(folder))
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(("umount", str(folder)), check=True)


if __name__ == "__main__":
    main()
