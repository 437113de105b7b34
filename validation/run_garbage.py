"""Thousands of damaged and forged inputs: each works or is refused in one message; one receipt.

    python validation/run_garbage.py --output validation/receipts --inputs 6000

Every input is drawn from its own seed, `--only KIND:NUMBER` repeats one. It is read in this process under a time limit
and a limit of the address space; an audit hook sees every file that is opened or changed, every process, every
connection and every class that a pickle asks for.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import logging
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from random import Random
from typing import Any

SECONDS_PER_INPUT = 10.0


def main() -> int:
    """Try inputs, write a receipt and return 1 if any did something else than work or be refused."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", metavar="KIND[:NUMBER]", help="one kind, or one input of it; writes no receipt"
    )
    parser.add_argument("--output", type=Path, default=Path("validation/receipts"))
    arguments = parser.parse_args()
    output, here = arguments.output.resolve(), Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        measured = _in_scratch(Path(scratch).resolve(), arguments)
    os.chdir(here)  # where the commit is asked for
    for bug in measured["bugs"]:
        print(bug)
    print(
        f"{measured['num_inputs']} inputs: {measured['works']} work, {measured['refused']} refused, "
        f"{len(measured['bugs'])} bugs, slowest {measured['slowest_cpu_seconds']:.2f} s of CPU time"
    )
    if arguments.only is None:
        import torch

        from poros.parity.receipts import write_receipt

        write_receipt(output / "garbage.json", torch.device("cpu"), measured)
    return 1 if measured["bugs"] else 0


def _in_scratch(scratch: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Make the seeds, then try inputs with ``scratch`` as the only place that there is."""
    home = scratch / "cache"
    # Before the first import of a library that reads them.
    os.environ.update(
        HF_HOME=str(home), XDG_CACHE_HOME=str(home), HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1"
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from garbage.kinds import Bench
    from garbage.seeds import make_seeds

    bench = Bench(make_seeds(scratch / "seeds"), scratch / "input", scratch / "output", home)
    for name in ("transformers", "peft"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return try_inputs(bench, scratch, arguments.inputs, arguments.seed, arguments.only)


def try_inputs(bench: Any, scratch: Path, num_inputs: int, seed: int, only: str | None) -> dict[str, Any]:
    """Try the inputs and return what the receipt says of them.

    Args:
        bench: a `garbage.kinds.Bench`.
        scratch: folder that holds everything.
        num_inputs: over all kinds.
        seed: of all inputs together.
        only: name of a kind, or ``KIND:NUMBER``.
    """
    from garbage.guard import Guard, limit_memory
    from garbage.kinds import KINDS

    chosen = [(kind, number) for kind in KINDS for number in _numbers(kind.share, num_inputs)]
    if only is not None:
        name, _, number = only.partition(":")
        chosen = [(k, n) for k, n in chosen if k.name == name and number in ("", str(n))]
    warm = {kind.name: kind for kind, _ in chosen}
    guard = Guard(allowed=(bench.output, bench.cache), inputs=bench.folder, seconds=SECONDS_PER_INPUT)
    bench.clear()
    os.chdir(bench.folder)
    warnings.simplefilter("ignore")
    for kind in warm.values():  # libraries that are imported on demand may write and need address space
        _warm_up(kind, bench)
    faulthandler.enable()
    limit_memory()
    before = _files(scratch, bench)
    counts: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in warm}
    bugs: list[str] = []
    slowest, started = 0.0, time.monotonic()
    for kind, number in chosen:
        bench.clear()
        os.chdir(bench.folder)
        use = kind.make(Random(f"{seed}-{kind.name}-{number}"), bench)
        begun = time.process_time()
        outcome = guard.judge(use)
        slowest = max(slowest, time.process_time() - begun)
        counts[kind.name][outcome.kind] += 1
        if outcome.kind == "bug":
            bugs.append(f"{kind.name}:{number}: {outcome.detail}")
        elif only is not None:
            print(f"{kind.name}:{number}: {outcome.kind} {outcome.detail}")
    changed = sorted(name for name, _ in before ^ _files(scratch, bench))
    bugs += [f"changed outside the output and cache folders: {name}" for name in changed]
    os.chdir("/")
    totals = sum(counts.values(), collections.Counter())
    return {
        "num_inputs": totals.total(),
        "works": totals["works"],
        "refused": totals["refused"],
        "bugs": bugs,
        "files_changed_outside": len(changed),
        "code_executed": sum("exec" in bug or "subprocess" in bug for bug in bugs),
        "kinds": {name: {"inputs": count.total(), **count} for name, count in counts.items()},
        "seed": seed,
        "cpu_seconds_per_input": SECONDS_PER_INPUT,
        "slowest_cpu_seconds": round(slowest, 3),
        "seconds": round(time.monotonic() - started, 1),
    }


def _warm_up(kind: Any, bench: Any) -> None:
    """Use a few inputs of a kind without a guard."""
    for number in range(3):
        bench.clear()
        try:
            kind.make(Random(f"warm-{number}"), bench)()
        except Exception:  # what comes of an input is asked later
            continue


def _numbers(share: int, num_inputs: int) -> range:
    return range(max(1, share * num_inputs // 100))


def _files(scratch: Path, bench: Any) -> set[tuple[str, int]]:
    """Return every file and its size but those of the input, the output and the cache."""
    mine = (bench.folder, bench.output, bench.cache)
    found = (path for path in scratch.rglob("*") if not any(path.is_relative_to(folder) for folder in mine))
    return {(str(path.relative_to(scratch)), path.lstat().st_size) for path in found if not path.is_dir()}


if __name__ == "__main__":
    sys.exit(main())
