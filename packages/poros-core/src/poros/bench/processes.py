"""Starting bench processes, ahead of time where the caller wants it, and collecting their results."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from poros.bench.spec import BenchSpec

__all__ = ["POROS_WORKER", "SpareProcess", "run_spec"]

POROS_WORKER = (sys.executable, "-m", "poros.bench.worker")
LOG_CHARACTERS = 3000


class SpareProcess:
    """A worker that has been started and waits for its line: imports run while another one measures.

    Use as a context manager: a process that was never used, or still runs, is ended.

    Args:
        command: of the worker; it calls `poros.bench.serve`.
        environment: of the process; None for this one's.
    """

    def __init__(
        self, command: Sequence[str] = POROS_WORKER, environment: Mapping[str, str] | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="poros-bench-")
        self._log = (Path(self._folder.name) / "log").open("w+b")
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=None if environment is None else dict(environment),
        )

    def __enter__(self) -> SpareProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, values: Mapping[str, Any], timeout_seconds: float | None = None) -> dict[str, Any]:
        """Send the line and return the result; a process that fails or is too slow gives an ``error``."""
        output = Path(self._folder.name) / "result.json"
        line = json.dumps({**values, "output": str(output)}) + "\n"
        try:
            self._process.communicate(line.encode(), timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            self._end()
            return self._error("too slow", f"ended after {timeout_seconds:.0f} s")
        if output.exists():
            return dict(json.loads(output.read_text()))
        return self._error("failed", f"exit code {self._process.returncode} and no result")

    def close(self) -> None:
        """End the process if it still runs, and remove its folder."""
        self._end()
        self._log.close()
        self._folder.cleanup()

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.close()
        self._process.wait()

    def _error(self, kind: str, message: str) -> dict[str, Any]:
        self._log.flush()
        self._log.seek(0)
        log = self._log.read().decode(errors="replace")
        return {"error": {"kind": kind, "message": message, "trace": log[-LOG_CHARACTERS:]}}


def run_spec(spec: BenchSpec, timeout_seconds: float | None = None) -> dict[str, Any]:
    """Measure one spec in a fresh process and return its result or its ``error``."""
    with SpareProcess() as process:
        return process.run(json.loads(spec.to_json()), timeout_seconds)
