"""``run.json``: the resolved settings of a run and what it ran on."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from typing import Any

import psutil
import torch

from poros.planning.planner import PlannedRun
from poros.run.device import describe_device
from poros.run.fingerprint import flatten

__all__ = ["RUN_FILE", "environment", "peak_host_bytes", "planned_record"]

RUN_FILE = "run.json"
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


def peak_host_bytes() -> int:
    """Return the highest resident size of this process so far; where the system does not tell, the current one."""
    if sys.platform == "linux":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(psutil.Process().memory_info().rss)
