"""A bench process: imports, waits for one line of JSON, measures it and writes the result.

``python -m poros.bench.worker`` measures a `BenchSpec`; peers have scripts of their own around `serve`. Whoever starts
the process may let it import early and send the line when the device is free. Until then nothing may touch the device:
its context would be charged to the process that is being measured. `bitsandbytes` asks the device questions when it is
imported, so `run` imports it, and what imports it.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from poros.checkpoint import atomic_write_json
from poros.errors import UserError

__all__ = ["OUTPUT", "serve"]

# The key of the line under which the parent says where the result goes.
OUTPUT = "output"
TRACE_CHARACTERS = 3000
# Most of the time that a process needs before it can measure.
EARLY = ("transformers.models.qwen2.modeling_qwen2",)


def serve(run: Callable[[Mapping[str, Any]], dict[str, Any]], *, early: Sequence[str] = EARLY) -> None:
    """Read one line from stdin, call ``run`` with its content, and write the result to the file that it names.

    An error is a result too: ``{"error": {"kind", "message", "trace"}}``, so that the rows after it still run.

    Args:
        run: from the line's content to a result.
        early: modules to import while there is no line yet.
    """
    for name in early:
        importlib.import_module(name)
    line = sys.stdin.readline()
    if not line.strip():
        return  # nobody needs this process any more
    values = json.loads(line)
    try:
        result = run(values)
    except Exception as error:
        result = {"error": _describe(error)}
    atomic_write_json(Path(values[OUTPUT]), result)


def _describe(error: Exception) -> dict[str, str]:
    if isinstance(error, torch.OutOfMemoryError):
        kind = "out of memory"
    elif isinstance(error, ImportError):
        kind = "not installed"
    elif isinstance(error, UserError):
        kind = "refused"
    else:
        kind = "failed"
    trace = "".join(traceback.format_exception(error))[-TRACE_CHARACTERS:]
    return {"kind": kind, "message": f"{type(error).__name__}: {error}", "trace": trace}


def _run_spec(values: Mapping[str, Any]) -> dict[str, Any]:
    from poros.bench.measure import run

    return run(values)


if __name__ == "__main__":
    serve(_run_spec)
