"""Measure a list of rows, each in a process of its own, and print one table. Every receipt is written at once.

    python validation/bench/run_all.py --output validation/receipts targets resident peft
    python validation/bench/run_all.py --output /tmp/bench --device cpu tiny
    python validation/bench/run_all.py --list

ROWS are groups or patterns of row names (`32b-*`, `targets:7b-*`). A row that fails does not stop the later
ones; rows for which no time is left are skipped and named. Exit code 1 if a row failed or was skipped, or a comparison
was not equal.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cases import Row, choose, groups
from final_table import final_table
from poros_rows import ConfigFolders, command, line

from poros.bench import SpareProcess
from poros.checkpoint import atomic_write_json
from poros.parity.receipts import without_machine_paths

# A row is not begun with less time left than this.
LEAST_ROW_SECONDS = 15
ENVIRONMENT = (
    "import json, sys, torch; from poros.parity.receipts import environment; "
    "print(json.dumps(environment(torch.device(sys.argv[1]))))"
)


def measure_rows(rows: list[Row], arguments: argparse.Namespace) -> list[tuple[Row, dict[str, Any]]]:
    """Measure the rows in order; while one measures, the process of the next one imports what it needs."""
    deadline = time.monotonic() + arguments.seconds
    environment: dict[str, Any] | None = None
    results: list[tuple[Row, dict[str, Any]]] = []
    with ConfigFolders() as folders:
        spare = SpareProcess(command(rows[0]))
        try:
            for index, row in enumerate(rows):
                environment = environment or _environment(arguments.device)
                process = spare
                if index + 1 < len(rows):
                    spare = SpareProcess(command(rows[index + 1]))
                with process:
                    result = _measure(row, process, folders, arguments, deadline)
                results.append((row, result))
                _write(arguments.output / row.file_name, row, result, environment)
        finally:
            spare.close()
    return results


def _measure(
    row: Row, process: SpareProcess, folders: ConfigFolders, arguments: argparse.Namespace, deadline: float
) -> dict[str, Any]:
    left = min(arguments.row_seconds, deadline - time.monotonic())
    if left < LEAST_ROW_SECONDS:
        return {"error": {"kind": "skipped", "message": f"no time left of {arguments.seconds:.0f} s"}}
    start = time.monotonic()
    values = line(row, folders.folder(row), device=arguments.device, steps=arguments.steps)
    result = process.run(values, left)
    result["row_seconds"] = time.monotonic() - start
    short = (
        result.get("error", {}).get("message") or result.get("verdict") or f"{result['step_seconds']:.3f} s"
    )
    print(f"[{result['row_seconds']:5.1f} s] {row.name}: {short}", flush=True)
    return result


def _environment(device: str) -> dict[str, Any]:
    """Ask another process: this one must not open a CUDA context, which the rows would be charged for."""
    asked = [sys.executable, "-c", ENVIRONMENT, device]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    script = Path(sys.argv[0]).name
    return json.loads(done.stdout.splitlines()[-1]) | {
        "command": shlex.join([script, *without_machine_paths(sys.argv[1:])])
    }


def _write(path: Path, row: Row, result: dict[str, Any], environment: dict[str, Any]) -> None:
    described = {k: v for k, v in asdict(row).items() if k not in ("plan", "numerics", "settings")}
    described["requested_plan"] = dict(row.plan)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_json(
        path,
        {"claim": "bench", "name": row.name, "environment": environment, "row": described, "result": result},
    )


def main() -> int:
    """Parse, measure, print the table last."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROWS")
    parser.add_argument("--output", type=Path, help="folder for the receipts")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=5, help="timed steps (default: 5)")
    parser.add_argument("--seconds", type=float, default=540, help="for everything (default: 540)")
    parser.add_argument("--row-seconds", type=float, default=120, help="for one row (default: 120)")
    parser.add_argument("--list", action="store_true", help="print the rows that would be measured")
    arguments = parser.parse_args()
    rows = choose(arguments.rows or list(groups()))
    if arguments.list:
        print("\n".join(row.name for row in rows))
        return 0
    if arguments.output is None:
        parser.error("--output is missing")
    results = measure_rows(rows, arguments)
    print(final_table(results), flush=True)
    bad = [r for _, r in results if "error" in r or r.get("verdict", "equal") != "equal"]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
