"""One parity run in a process of its own: ``python -m poros.parity.worker SPEC.json``.

Repeatability and restart are claims about fresh processes, so the gates start them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from poros.determinism import configure
from poros.parity.case_run import start_case
from poros.parity.trajectory import Trajectory
from poros.plugins import load_registry
from poros.settings import Plan

__all__ = ["WorkerSpec", "run_worker", "spawn_worker"]

TRAJECTORY = "trajectory.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """What a worker process runs.

    Attributes:
        case: name of a registered parity case.
        plan: keyword arguments of `Plan`.
        device: torch device string.
        num_steps: optimizer steps to run.
        output: folder for the trajectory and the checkpoints.
        save: write a checkpoint after the last step.
        resume: folder of an earlier worker whose newest checkpoint this one continues.
    """

    case: str
    plan: Mapping[str, Any]
    device: str
    num_steps: int
    output: str
    save: bool = False
    resume: str | None = None


def run_worker(spec: WorkerSpec) -> Trajectory:
    """Run a spec in this process and return the trajectory of its steps."""
    from poros.run.checkpointing import find_checkpoint, restore_state, save_state

    device = torch.device(spec.device)
    configure(device)
    registry = load_registry()
    run = start_case(registry.parity_cases()[spec.case].value, Plan(**spec.plan), registry, device)
    try:
        if spec.resume is not None:
            state, folder, _ = find_checkpoint(Path(spec.resume))
            restore_state(state, run.engine, run.optimizer, folder)
            run.next_step = state.step
        run.train(spec.num_steps)
        if spec.save:
            save_state(Path(spec.output), run.next_step, run.engine, run.optimizer, {})
    finally:
        run.close()
    return run.trajectory


def spawn_worker(spec: WorkerSpec) -> Trajectory:
    """Run a spec in a fresh process and return its trajectory (without signatures).

    Raises:
        RuntimeError: the process failed; its error output is included.
    """
    output = Path(spec.output)
    output.mkdir(parents=True, exist_ok=True)
    path = output / "spec.json"
    path.write_text(json.dumps({**asdict(spec), "plan": dict(spec.plan)}))
    done = subprocess.run(
        [sys.executable, "-m", "poros.parity.worker", str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"Parity worker for `{spec.case}` failed ({done.returncode}):\n{done.stderr}")
    return Trajectory.load(output / TRAJECTORY, ())


def _main() -> None:
    spec = WorkerSpec(**json.loads(Path(sys.argv[1]).read_text()))
    run_worker(spec).save(Path(spec.output) / TRAJECTORY)


if __name__ == "__main__":
    _main()
