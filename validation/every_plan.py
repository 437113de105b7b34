"""Draw hundreds of plans over tiny models of every family and write what was tried into a receipt.

Run through nox, which passes its arguments on: ``uv run nox -s every-plan -- --draws 600 --device cuda``. Exit code 1
and no receipt if a plan changes a bit; hypothesis then prints the smallest draw that does.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from poros.determinism import configure
from poros.parity.plan_draws import NUM_STEPS, PLANS, PlanTrials, Setting, eager_cases, settings_of
from poros.parity.receipts import write_receipt
from poros.plugins import load_registry
from poros.run.device import resolve_device
from poros.settings import Plan

PLANS_PER_SETTING = 4


def main() -> None:
    """Draw, train, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=360, help="plans to try, at least")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=Path("validation/receipts"))
    arguments = parser.parse_args()
    device = resolve_device(arguments.device)
    configure(device)
    with tempfile.TemporaryDirectory(prefix="poros-stores-") as folder:
        _draw(PlanTrials(load_registry(), device, Path(folder)), arguments)


def _draw(trials: PlanTrials, arguments: argparse.Namespace) -> None:
    num_settings = -(-arguments.draws // PLANS_PER_SETTING)
    plans = st.lists(PLANS, min_size=PLANS_PER_SETTING, max_size=PLANS_PER_SETTING, unique=True)

    @settings(
        max_examples=num_settings, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(setting=settings_of(eager_cases(trials.registry)), drawn=plans)
    def every_plan(setting: Setting, drawn: list[Plan]) -> None:
        for plan in drawn:
            trials.try_plan(setting, plan)
        print(f"{trials.draws} draws, {time.perf_counter() - start:.0f} s", flush=True)

    start = time.perf_counter()
    every_plan()
    measured = {
        "claim": "every plan",
        "families": sorted(trials.families),
        "draws": trials.draws,
        "draws_from_disk": trials.draws_from_disk,
        "distinct_plans": len(trials.plans),
        "settings": len(trials.hashes),
        "steps": NUM_STEPS,
        "different": 0,
        "hashes": sorted(trials.hashes.values()),
        "seconds": time.perf_counter() - start,
    }
    file = arguments.output / f"every-plan-{trials.device.type}.json"
    write_receipt(file, trials.device, measured)
    print(
        f"{trials.draws} draws, {trials.draws_from_disk} of them with blocks from the disk, {len(trials.plans)} "
        f"different plans, {len(trials.hashes)} settings of {', '.join(sorted(trials.families))}: each setting has "
        f"one state hash. {file}"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
