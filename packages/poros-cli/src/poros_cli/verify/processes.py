"""Starting the processes of `poros verify`, one after the other: each has the device to itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from poros.errors import CannotCompareError, UserError
from poros.verify.side import SideSpec

__all__ = ["Worker", "WorkerResult"]

COMMAND = (sys.executable, "-m", "poros_cli.verify.worker")
MAX_LOG_CHARACTERS = 1500


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """What one process found.

    Attributes:
        said: lines for the user about the model and its rows.
        environment: command, versions and device, for the receipt.
        about: whose weights and rows these are.
        sides: one result of `run_side` per spec.
    """

    said: tuple[str, ...]
    environment: dict[str, Any]
    about: dict[str, Any]
    sides: tuple[dict[str, Any], ...]


class Worker:
    """Runs sides of one target in fresh processes.

    Args:
        target: config file or model.
        overrides: every ``--set``.
        folder: where sides lie; as large as a few times the adapter and its optimizer state per step.
    """

    def __init__(self, target: str, overrides: tuple[str, ...], folder: Path) -> None:
        self._target, self._overrides, self.folder = target, overrides, folder
        self._count = 0

    def run(self, sides: Sequence[SideSpec]) -> WorkerResult:
        """Run ``sides`` in one process.

        A side that the process did not live to report counts as failed, with the end of its output.

        Raises:
            UserError: the target cannot be run at all.
            CannotCompareError: the process died before it opened the run.
        """
        self._count += 1
        job, result = (self.folder / f"{name}-{self._count}.json" for name in ("job", "result"))
        content = {
            "target": self._target,
            "overrides": list(self._overrides),
            "folder": str(self.folder),
            "result": str(result),
            "sides": [asdict(side) for side in sides],
        }
        job.write_text(json.dumps(content), encoding="utf-8")
        done = subprocess.run(
            [*COMMAND, str(job)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        log = done.stdout.strip()[-MAX_LOG_CHARACTERS:]
        if not result.exists():
            raise CannotCompareError(f"A process of the comparison ended with {done.returncode}: {log}")
        found = json.loads(result.read_text(encoding="utf-8"))
        if "user_error" in found:
            raise UserError(found["user_error"])
        reported = list(found["sides"])
        for side in sides[len(reported) :]:
            failure = f"its process ended with {done.returncode}: {log}"
            reported.append({"name": side.name, "steps": {}, "failure": failure, "out_of_memory": False})
        return WorkerResult(
            tuple(found["said"]), found.get("environment", {}), found.get("about", {}), tuple(reported)
        )
