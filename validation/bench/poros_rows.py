"""From a row to the process that measures it and the line that the process is sent."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cases import GB, PEERS, Row, make_config

from poros.bench.processes import POROS_WORKER

HERE = Path(__file__).parent
# Enough for graphs to be captured and code to be compiled; peers have neither to wait for, and take long steps.
WARMUP_STEPS = {"peer": 2, "poros": 3}
CHECK_STEPS = 3


class ConfigFolders:
    """Folders that hold a ``config.json`` each, made when they are asked for. Use as a context manager."""

    def __enter__(self) -> ConfigFolders:
        self._root = tempfile.TemporaryDirectory(prefix="poros-bench-configs-")
        return self

    def __exit__(self, *_: object) -> None:
        self._root.cleanup()

    def folder(self, row: Row) -> str:
        """Return the folder of the row's shape and depth."""
        path = Path(self._root.name) / f"{row.case.shape}-{row.num_blocks}"
        if not path.exists():
            make_config(row.case.shape, row.num_blocks).save_pretrained(path)
        return str(path)


def command(row: Row) -> tuple[str, ...]:
    """Return the worker's command."""
    if row.system in PEERS:
        return (sys.executable, str(HERE / f"peer_{row.system}.py"))
    if row.without:
        return (sys.executable, str(HERE / "ablation.py"))
    return POROS_WORKER


def line(row: Row, folder: str, *, device: str, steps: int) -> Mapping[str, Any]:
    """Return what the worker is sent: a `BenchSpec`, and for peers their settings and a folder for their files."""
    check = row.system == "check"
    plan = dict(row.plan)
    if row.system == "poros-resident":
        plan["residency"] = "resident"
    return {
        "model": folder,
        "quantization": row.case.quantization,
        "rank": 16,
        "plan": plan,
        "planned": row.planned,
        "numerics": {"blocks": row.blocks, **row.numerics},
        "without": row.without,
        "settings": dict(row.settings),
        "scratch": str(Path(folder).parent),
        "micro_batches": row.case.micro_batches,
        "micro_batch_size": row.case.micro_batch_size,
        "tokens": row.case.tokens,
        "device": device,
        "mode": "check" if check else "time",
        "warmup_steps": WARMUP_STEPS["peer" if row.system in PEERS else "poros"],
        "steps": CHECK_STEPS if check else steps,
        "oracle_graphs": row.oracle_graphs,
        "memory_limit_bytes": None if row.budget_gb is None else int(row.budget_gb * GB),
    }
