"""Where a step's device time goes: kernels of one resident step by name, and how long the device waited between them.

    python validation/bench/profile_step.py --output validation/receipts --blocks 8 32b-8x512:compiled 7b-2048:eager

Depth is cut, because shares are asked for and not times; the head and the optimizer weigh more than at full depth.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from cases import Row, choose
from poros_rows import ConfigFolders, line
from torch.profiler import ProfilerActivity, profile

from poros.bench.build import make_batches, start_run
from poros.bench.spec import BenchSpec
from poros.determinism import configure
from poros.parity.receipts import write_receipt
from poros.plugins import Registry, load_registry
from poros.settings import Plan

# Kernels are loaded, graphs captured and code compiled before the step that is looked at.
WARMUP_STEPS = 4
NUM_NAMED = 40


def profile_step(
    case: str, blocks: str, depth: int, registry: Registry, device: torch.device
) -> dict[str, Any]:
    """Return the kernels of one step (milliseconds, launches) and the time in which none ran."""
    known = next(row.case for row in choose([f"planned:{case}/*"]))
    row = Row(case=known, system="poros-resident", blocks=blocks, num_blocks=depth)
    with ConfigFolders() as folders:
        spec = BenchSpec.from_mapping(line(row, folders.folder(row), device="cuda", steps=1))
        run = start_run(spec, Plan(residency="resident", workspace=True), registry, device)
    batches = [
        make_batches(spec, int(run.engine.model.config.vocab_size), step) for step in range(WARMUP_STEPS + 1)
    ]
    for step in range(WARMUP_STEPS):
        run.step(batches[step], step)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run.step(batches[WARMUP_STEPS], WARMUP_STEPS)
        torch.cuda.synchronize()
    run.engine.close()
    return _totals(profiled.events())


def _totals(events: Any) -> dict[str, Any]:
    ran = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in events
        if e.device_type == torch.autograd.DeviceType.CUDA
    )
    by_name: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    idle, until = 0.0, ran[0][0]
    for start, end, name in ran:
        by_name[name][0] += (end - start) / 1e3
        by_name[name][1] += 1
        idle += max(0.0, start - until) / 1e3
        until = max(until, end)
    largest = sorted(by_name.items(), key=lambda item: -item[1][0])[:NUM_NAMED]
    return {
        "kernel_milliseconds": sum(total for total, _ in by_name.values()),
        "idle_milliseconds": idle,
        "kernels": [{"name": name, "milliseconds": t, "launches": n} for name, (t, n) in largest],
    }


def main() -> None:
    """Profile every case, write one receipt."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="+", metavar="CASE:BLOCKS")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=8, help="decoder blocks (default: 8)")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    configure(device)
    registry = load_registry()
    results = {
        text: profile_step(*text.split(":"), arguments.blocks, registry, device) for text in arguments.cases
    }
    measured = {"claim": "profile", "num_blocks": arguments.blocks, "results": results}
    write_receipt(arguments.output / "profile-steps.json", device, measured)


if __name__ == "__main__":
    main()
