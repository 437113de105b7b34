"""One process of `poros verify`: ``python -m poros_cli.verify.worker JOB.json`` runs sides and writes their results.

Fresh processes are part of the claim: nothing that one side left behind, in memory or on a device, helps the next.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from poros.checkpoint import atomic_write_json
from poros.errors import UserError
from poros.parity.receipts import environment
from poros.plugins import load_registry
from poros.run.device import resolve_device
from poros.verify.side import SideSpec, run_side
from poros_cli.verify.subject import make_subject, target_config
from poros_data import DataError

__all__ = ["work"]


def work(job: dict[str, Any]) -> None:
    """Run a job's sides one after the other; ``job["result"]`` is rewritten after each of them.

    Args:
        job: target, overrides, folder of all sides, side specs, result file.
    """
    said: list[str] = []
    result: dict[str, Any] = {"said": said, "sides": []}
    target, overrides = job["target"], tuple(job["overrides"])
    file = Path(job["result"])
    with tempfile.TemporaryDirectory(prefix="poros-verify-") as scratch:
        output = Path(scratch) / "run"
        try:
            subject = make_subject(target, overrides, output, load_registry(), said.append)
            device = resolve_device(target_config(target, overrides, output).device)
        except (UserError, DataError) as error:
            atomic_write_json(file, {**result, "user_error": str(error)})
            return
        said.extend(f"Note: {note}" for note in subject.model.notes)
        result |= {"environment": environment(device), "about": dict(subject.about)}
        for values in job["sides"]:
            start = time.perf_counter()
            side = run_side(SideSpec(**values), subject, Path(job["folder"]))
            result["sides"].append({**side, "seconds": time.perf_counter() - start})
            atomic_write_json(file, result)


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)
    work(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
