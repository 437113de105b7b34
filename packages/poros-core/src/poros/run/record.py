"""``run.json``: the resolved settings of a run and what it ran on."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil
import torch

from poros.errors import OutputError, PorosError
from poros.evidence import platform_status
from poros.interfaces import StepSource
from poros.planning.planner import PlannedRun
from poros.planning.replay import timeline_record
from poros.run.device import describe_device
from poros.run.fingerprint import flatten
from poros.run.opening import OpenModel
from poros.run.settings import RunSettings

__all__ = [
    "REPORT_FILE",
    "RUN_FILE",
    "environment",
    "failure_recorded",
    "fingerprint_record",
    "model_record",
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


def model_record(model: OpenModel, device: torch.device) -> dict[str, Any]:
    """Return what the run trains on, and what stands behind the claim of bitwise equality."""
    return {
        "model": {
            "name": model.name,
            "architecture": model.meta.architecture.name,
            "status": model.verdict.status,
            "registered_by": model.verdict.distribution,
            "receipts": [flatten(receipt) for receipt in model.verdict.receipts],
            "platform": platform_status(model.verdict.receipts, device),
        },
        "num_blocks": len(model.meta.blocks),
        "device": describe_device(device),
    }


def planned_record(
    model: OpenModel, planned: PlannedRun, with_one_more_gb: PlannedRun, device: torch.device
) -> dict[str, Any]:
    """Return the plan and everything that was predicted, with what it was predicted from."""
    prediction, step = planned.prediction, planned.time
    return {
        "plan": flatten(planned.plan),
        "predicted_shape": flatten(planned.shape),
        "predicted_device_bytes": dict(prediction.device),
        "predicted_host_bytes": dict(prediction.host),
        "predicted_step": flatten(step),
        "predicted_timeline": timeline_record(model.meta, model.numerics, planned, device.type),
        "binding": planned.binding,
        "seconds_with_one_more_gb": with_one_more_gb.time.seconds,
        "budget": flatten(planned.budget),
        "rates": flatten(planned.rates),
    }


def fingerprint_record(
    model: OpenModel,
    steps: StepSource,
    settings: RunSettings,
    data_record: Mapping[str, Any],
    device: torch.device,
) -> dict[str, Any]:
    """Return everything that decides a run's result, as ``section.name -> JSON value``; see `compare_fingerprints`."""
    chooses = settings.keep_best or settings.early_stop_patience is not None
    names = ("eval_every", "early_stop_patience", "early_stop_min_delta", "keep_best")
    return flatten(
        {
            "model": {"architecture": model.meta.architecture.name, "weights": model.source.fingerprint},
            "quantization": model.weight_format.fingerprint(),
            "lora": {
                **flatten(model.lora),
                "targets": model.meta.targets,
                # What was read, not where: the folder may move.
                "init_from": None if model.start is None else model.start.fingerprint,
            },
            "numerics": model.numerics,
            "kernels": dict(model.meta.architecture.kernels()),
            "optimizer": settings.optimizer,
            # Evaluations that choose nothing decide nothing.
            "selection": {name: getattr(settings, name) if chooses else None for name in names},
            "seed": settings.seed,
            "num_steps": steps.num_steps,
            "data": {**data_record, "steps": steps.fingerprint},
            "environment": environment(device),
        }
    )


@contextlib.contextmanager
def failure_recorded(write: Callable[[str], None]) -> Iterator[None]:
    """Call ``write`` with why the run failed, and let the error go on; one of an unknown kind comes with its class."""
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, PorosError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OutputError):  # a full disk; the error that is on its way says more
            write(reason)
        raise


def peak_host_bytes() -> int:
    """Return the highest resident size of this process so far; where the system does not tell, the current one."""
    if sys.platform == "linux":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(psutil.Process().memory_info().rss)
