"""Kill training runs at random points and resume them: nothing is lost and no bit differs; one receipt.

    python validation/crashes.py --output validation/receipts --kills 110

A tiny `poros train` is forked again and again and killed with SIGKILL: at chosen file calls (half of a write included)
of every part of a run, and by the clock within steps, evaluations and saves. What was left is then resumed, often under
another plan, sometimes after a second kill, sometimes with its newest checkpoint damaged besides, and compared byte by
byte with the run that nobody killed. `full_disk.py` does the same with disks that are full.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from file_faults import area_of
from tiny_run import NUM_STEPS, Ended, Fault, prepare, start

from poros.checkpoint import newest_complete
from poros.checkpoint.manifest import check_manifest
from poros.errors import CheckpointError
from poros.parity.receipts import write_receipt

# Per area of file calls, and per area of the clock, the share of kills.
SHARES = {
    "save": 22,
    "pruning": 8,
    "store cache": 12,
    "rows cache": 6,
    "final adapter": 12,
    "records": 14,
    "dry save": 4,
}
CLOCK = {"step": 12, "evaluation": 8, "save": 6, "anywhere": 6}
PLANS = (
    (),
    ("--set", "plan.slots=3"),
    ("--set", "plan.residency=resident"),
    ("--set", "plan.slots=2", "--set", "plan.order=micro-batch-major"),
    ("--set", "plan.resident_blocks=1"),
    ("--set", "ram=2GB", "--set", "vram=2GB"),
)
SECOND_KILL, DAMAGE = 0.2, 0.15
LEFTOVERS = (".tmp-", ".old-", ".gone-", ".rows-")
# What a step or evaluation says about itself that is the same in every run.
LASTING = ("step", "loss", "learning_rate", "grad_norm", "tokens", "supervised_tokens", "eval_loss")


@dataclass
class Tally:
    """What was found.

    Attributes:
        broken: sentences about what does not hold.
    """

    kills: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    points: set[str] = field(default_factory=set)
    not_reached: int = 0
    resumed: int = 0
    started_anew: int = 0
    equal: int = 0
    other_plan: int = 0
    second_kills: int = 0
    damaged_and_named: int = 0
    torn_metrics: int = 0
    leftovers_after_kills: int = 0
    steps_repeated: int = 0
    bytes_lost: int = 0
    broken: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        values = dict(self.__dict__)
        return values | {"hits": dict(sorted(self.hits.items())), "points": len(self.points)}


def evidence(output: Path) -> dict[str, Any]:
    """Return the bytes and values that must be the same: adapter, weights, moments, random state, choice, metrics."""
    last = output / "checkpoints" / f"step-{NUM_STEPS:06d}"
    state = json.loads((last / "state.json").read_text())
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {
        "adapter": (output / "adapter" / "adapter_model.safetensors").read_bytes(),
        "adapter config": (output / "adapter" / "adapter_config.json").read_bytes(),
        "weights, moments and random state": (last / "state.safetensors").read_bytes(),
        "evaluations": (state["step"], state["meta"]["selection"]),
        "metrics": [{name: line[name] for name in LASTING if name in line} for line in lines],
        "best": (output / "best.json").read_bytes(),
        "checkpoints": sorted(path.name for path in (output / "checkpoints").iterdir()),
    }


def leftovers(folder: Path) -> list[Path]:
    """Return what interrupted writes left below ``folder``."""
    return [path for path in folder.rglob(".*") if any(kind in path.name for kind in LEFTOVERS)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Kill, resume, compare, write the receipt, and fail where something does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("validation/receipts"))
    parser.add_argument("--kills", type=int, default=110)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    begun, draw, tally = time.monotonic(), random.Random(chosen.seed), Tally()
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        prepare(home)
        whole = start(home, home / "whole", count=True)
        assert whole.code == 0, whole.shown
        expected = evidence(home / "whole" / "output")
        for number, fault in enumerate(faults(chosen.kills, whole, draw)):
            trial = home / f"trial-{number}"
            if not fresh_cache(fault, whole):
                shutil.copytree(home / "whole" / "cache", trial / "cache")
            try:
                kill_and_go_on(home, trial, fault, expected, tally, draw)
            except AssertionError as error:
                tally.broken.append(f"trial {number}, {fault}: {error}")
            print(f"{number}: {dict(tally.hits)} {tally.broken[-1:]}", flush=True)
            shutil.rmtree(trial, ignore_errors=True)
    found = tally.record() | {"seed": chosen.seed, "seconds": round(time.monotonic() - begun, 1)}
    write_receipt(chosen.output / "crashes.json", torch.device("cpu"), {"measured": found})
    print(json.dumps(found, indent=2))
    if tally.broken:
        raise SystemExit(f"{len(tally.broken)} of {tally.kills} do not hold.")


def faults(count: int, whole: Ended, draw: random.Random) -> Iterator[Fault]:
    """Draw faults: every area gets its share of ``count``, at random points of it."""
    by_area: dict[str, list[int]] = {}
    for number, call in enumerate(whole.calls):
        by_area.setdefault(area_of(call), []).append(number)
    total = sum(SHARES.values()) + sum(CLOCK.values())
    chosen: list[Fault] = []
    for area, share in SHARES.items():
        points = by_area[area]
        num_points = max(1, round(count * share / total))
        # As few repetitions as there can be.
        drawn = [point for _ in range(num_points // len(points)) for point in points]
        chosen += [Fault(at=point) for point in drawn + draw.sample(points, num_points - len(drawn))]
    seconds = {"step": 0.08, "evaluation": 0.04, "save": 0.05, "anywhere": whole.seconds}
    visits = {"step": NUM_STEPS, "evaluation": 3, "save": 3, "anywhere": 1}
    for area, share in CLOCK.items():
        for _ in range(max(1, round(count * share / total))):
            delay = draw.random() * seconds[area]
            chosen.append(Fault(area=area, visit=draw.randrange(visits[area]), delay=delay))
    draw.shuffle(chosen)
    yield from chosen


def fresh_cache(fault: Fault, whole: Ended) -> bool:
    """Return whether the fault needs a run that writes its caches; others share the bytes of an earlier one."""
    return fault.at is not None and fault.at < len(whole.calls)


def kill_and_go_on(
    home: Path, trial: Path, fault: Fault, expected: dict[str, Any], tally: Tally, draw: random.Random
) -> None:
    """Run one trial.

    Raises:
        AssertionError: something does not hold.
    """
    output = trial / "output"
    ended = start(home, trial, fault=fault)
    _count_kill(ended, tally)
    _check_left(output, ended.saved, tally)
    more: tuple[str, ...] = ()
    if draw.random() < SECOND_KILL and ended.code is None:
        more = _how_to_go_on(output, tally, draw)
        before = ended.saved
        ended = start(home, trial, *more, fault=Fault(at=draw.randrange(120)))
        tally.second_kills += ended.code is None
        _count_kill(ended, tally)
        _check_left(output, (*before, *ended.saved) if "--resume" in more else ended.saved, tally)
    damaged = _damage_newest(output) if draw.random() < DAMAGE else None
    more = _how_to_go_on(output, tally, draw)
    newest, _ = newest_complete(output)
    done = 0 if newest is None else int(newest.name.removeprefix("step-"))
    for path in leftovers(trial):  # as if the kill were a while ago
        os.utime(path, (0, 0))
        tally.leftovers_after_kills += 1
    last = start(home, trial, *more)
    assert last.code == 0, last.shown
    first = json.loads((output / "run.json").read_text())["first_step"]
    assert first == done, f"went on from step {first}, the newest complete checkpoint is of step {done}"
    if damaged is not None and newest is not None:
        assert damaged.name in " ".join(last.shown.split()), f"{damaged.name} is not named: {last.shown}"
        tally.damaged_and_named += 1
        if damaged.exists() and not _is_whole(damaged):  # it stays for the user to see
            shutil.rmtree(damaged)
    found = evidence(output)
    if damaged is not None:
        found["checkpoints"] = expected["checkpoints"]
    for name, value in expected.items():
        assert found[name] == value, f"{name} differ"
    assert not (left := leftovers(trial)), f"left over: {left}"
    tally.equal += 1


def _count_kill(ended: Ended, tally: Tally) -> None:
    if ended.code is None and ended.hit is not None:
        tally.kills += 1
        tally.hits[ended.hit[0]] += 1
        tally.points.add(" ".join(ended.hit))
    else:
        assert ended.code == 0, ended.shown
        tally.not_reached += 1


def _check_left(output: Path, saved: Sequence[int], tally: Tally) -> None:
    """Check what the kill has left: the last announced checkpoint is whole, and so is every other one."""
    metrics = output / "metrics.jsonl"
    tally.torn_metrics += (
        metrics.exists() and not metrics.read_bytes().endswith(b"\n") and metrics.stat().st_size > 0
    )
    folders = list((output / "checkpoints").glob("step-*"))
    for folder in folders:
        if not _is_whole(folder):
            tally.bytes_lost += sum(path.stat().st_size for path in folder.iterdir())
            raise AssertionError(f"{folder.name} is not whole after the kill")
    newest, skipped = newest_complete(output)
    assert not skipped, f"skipped {skipped}"
    done = 0 if newest is None else int(newest.name.removeprefix("step-"))
    assert done >= max(saved, default=0), f"step {max(saved)} was saved, step {done} is there"
    lines = metrics.read_bytes().splitlines() if metrics.exists() else []
    seen = [json.loads(line)["step"] for line in lines[: -1 if lines else None]]
    tally.steps_repeated += max(0, max(seen, default=0) - done)


def _how_to_go_on(output: Path, tally: Tally, draw: random.Random) -> tuple[str, ...]:
    plan = draw.choice(PLANS)
    tally.other_plan += bool(plan)
    if newest_complete(output)[0] is None:
        tally.started_anew += 1
        return ("--overwrite", *plan)
    tally.resumed += 1
    return ("--resume", *plan)


def _damage_newest(output: Path) -> Path | None:
    """Cut or flip the newest checkpoint where an older one remains, as a failing disk would; return it."""
    folders = sorted((output / "checkpoints").glob("step-*"))
    if len(folders) < 2:
        return None
    file = folders[-1] / "state.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return folders[-1]


def _is_whole(folder: Path) -> bool:
    try:
        check_manifest(folder)
    except CheckpointError:
        return False
    return True


if __name__ == "__main__":
    main()
