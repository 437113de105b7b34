"""``run.json``: the resolved settings of a run and what it ran on."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from poros.checkpoint import atomic_write_json
from poros.errors import OutputError, PorosError
from poros.planning.planner import PlannedRun
from poros.run.device import describe_device
from poros.run.fingerprint import flatten

__all__ = [
    "REPORT_FILE",
    "RUN_FILE",
    "environment",
    "failure_recorded",
    "peak_host_bytes",
    "planned_record",
]

RUN_FILE = "run.json"
# What `poros report` writes; it is named here because a run that starts anew makes it stale.
REPORT_FILE = "report.html"
DISTRIBUTIONS = (
    "poros-core",
    "poros-quant",
    "poros-data",
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "safetensors",
)


def environment(device: torch.device) -> dict[str, Any]:
    """Return the versions and the device that decide bits besides the settings."""
    versions = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    described = describe_device(device)
    if device.type == "cuda":
        described = torch.cuda.get_device_name(device)
        versions["cuda"] = str(torch.version.cuda)
    return {"device": described, "platform": platform.system(), "versions": versions}


def planned_record(planned: PlannedRun, with_one_more_gb: PlannedRun) -> dict[str, Any]:
    """Return the plan and everything that was predicted, with what it was predicted from."""
    prediction, step = planned.prediction, planned.time
    return {
        "plan": flatten(planned.plan),
        "predicted_shape": flatten(planned.shape),
        "predicted_device_bytes": dict(prediction.device),
        "predicted_host_bytes": dict(prediction.host),
        "predicted_step": flatten(step),
        "binding": planned.binding,
        "seconds_with_one_more_gb": with_one_more_gb.time.seconds,
        "budget": flatten(planned.budget),
        "rates": flatten(planned.rates),
    }


@contextlib.contextmanager
def failure_recorded(path: Path, record: Mapping[str, Any]) -> Iterator[None]:
    """Add why the run failed to its record, and let the error go on; one of an unknown kind comes with its class."""
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, PorosError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OutputError):  # a full disk; the error that is on its way says more
            atomic_write_json(path, {**record, "failure": reason})
        raise


def peak_host_bytes() -> int:
    """Return the highest resident size of this process so far; where the system does not tell, the current one."""
    if sys.platform == "linux":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(psutil.Process().memory_info().rss)
