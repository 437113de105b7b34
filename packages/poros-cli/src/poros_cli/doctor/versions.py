"""Versions of everything whose version can change bits or decide whether a kernel exists."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path

import torch

__all__ = ["driver_version", "versions"]

DISTRIBUTIONS = (
    *("poros-core", "poros-quant", "poros-arch-qwen", "poros-arch-gemma", "poros-data", "poros-cli"),
    *("transformers", "peft", "bitsandbytes", "safetensors", "tokenizers"),
)
PROC_DRIVER = Path("/proc/driver/nvidia/version")
SMI = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
SMI_TIMEOUT_SECONDS = 10


def versions() -> dict[str, str | None]:
    """Return versions by name; None is not installed, or not there."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "nvidia_driver": driver_version(),
    }
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def driver_version(proc: Path = PROC_DRIVER) -> str | None:
    """Return the NVIDIA driver's version, or None without a driver. WSL has no ``/proc`` file, so ask nvidia-smi."""
    try:
        text = proc.read_text()
    except OSError:
        text = _ask_smi()
    match = re.search(r"\b(\d{3,}(?:\.\d+)+)\b", text)
    return match.group(1) if match else None


def _ask_smi() -> str:
    try:
        return subprocess.run(SMI, capture_output=True, text=True, timeout=SMI_TIMEOUT_SECONDS).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
