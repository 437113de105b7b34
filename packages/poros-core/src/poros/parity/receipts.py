"""Receipts: JSON records of a measurement, with the command, commit, device and versions that it holds for."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from poros.checkpoint import atomic_write_json
from poros.evidence import device_name

__all__ = ["COMMIT_VARIABLE", "environment", "without_machine_paths", "write_receipt"]

# A machine that received a copy of the tree without its history is told the commit here.
COMMIT_VARIABLE = "POROS_COMMIT"

PACKAGES = ("poros-core", "torch", "transformers", "peft", "bitsandbytes", "safetensors")


def environment(device: torch.device) -> dict[str, Any]:
    """Return command, commit, device, driver and versions."""
    facts: dict[str, Any] = {
        "command": " ".join(without_machine_paths(sys.argv)),
        "commit": os.environ.get(COMMIT_VARIABLE)
        or _run("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "device": str(device),
        "device_name": device_name(device),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
    }
    if device.type == "cuda":
        facts["compute_capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
        facts["torch_cuda"] = torch.version.cuda
        facts["driver"] = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return facts


def write_receipt(
    path: Path, device: torch.device, measured: Mapping[str, Any], kernels: Mapping[str, str] | None = None
) -> None:
    """Write one receipt: the environment and what was measured in it.

    Args:
        kernels: which implementations of replaceable functions ran; see `Architecture.kernels`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = environment(device) | ({"kernels": dict(kernels)} if kernels else {})
    atomic_write_json(path, {"environment": facts, **measured})


def without_machine_paths(arguments: Sequence[str]) -> list[str]:
    """Shorten absolute paths to their last part: where a machine keeps its files is nobody's business."""
    return [Path(argument).name if Path(argument).is_absolute() else argument for argument in arguments]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _run(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None
