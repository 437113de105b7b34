"""Choosing the one device of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from poros.errors import ConfigError, DeviceError, UserError, explain

__all__ = ["describe_device", "refuse_many_processes", "resolve_device", "slow_arithmetic_notes"]


def resolve_device(name: str) -> torch.device:
    """Return the device for ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; CUDA devices carry their index.

    Raises:
        ConfigError: the name is none of these.
        DeviceError: a CUDA device was asked for and torch has none of that index.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (":" in name and (kind == "cpu" or not index.isdecimal())):
        raise ConfigError(
            explain("Bad setting `device`", expected="auto, cpu, cuda or cuda:N", got=repr(name))
        )
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        why = (
            "this torch is built without CUDA" if torch.version.cuda is None else "no usable driver or device"
        )
        raise DeviceError(
            explain(
                f"Cannot use device `{name}`",
                expected="a CUDA device",
                got=f"none ({why})",
                next_step="Run `poros doctor`, or use `--device cpu`",
            )
        )
    count = torch.cuda.device_count()
    chosen = torch.cuda.current_device() if device.index is None else device.index
    if chosen >= count:
        raise DeviceError(
            explain(f"Cannot use device `{name}`", expected=f"an index below {count}", got=chosen)
        )
    return torch.device("cuda", chosen)


def describe_device(device: torch.device) -> str:
    """Return the device's name and index for people."""
    return f"{torch.cuda.get_device_name(device)} ({device})" if device.type == "cuda" else "CPU"


def refuse_many_processes(environment: Mapping[str, str] = os.environ) -> None:
    """Raise `UserError` if a launcher started several processes: each would train the same adapter on its own."""
    world_size = environment.get("WORLD_SIZE", "1").strip() or "1"
    if world_size != "1":
        raise UserError(
            f"Poros trains in one process on one device, but `WORLD_SIZE` is {world_size}: start `poros train` without "
            "torchrun, accelerate or another launcher, and choose the device with `--device cuda:N`."
        )


def slow_arithmetic_notes(device: torch.device, compute_dtype: torch.dtype) -> tuple[str, ...]:
    """Return a note where products in ``compute_dtype`` are emulated: bfloat16 on a CPU below AVX-512."""
    if device.type != "cpu" or compute_dtype != torch.bfloat16:
        return ()
    capability = torch.backends.cpu.get_cpu_capability()
    if "AVX512" in capability or "AMX" in capability:
        return ()
    return (
        f"This CPU ({capability}) emulates bfloat16, many times slower than float32: set "
        "`numerics.compute_dtype: float32`.",
    )
