"""Collecting everything that `poros doctor` shows, as plain data with units in the names."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from typing import Any

import torch

from poros.errors import DeviceError, PluginError
from poros.plugins import ENTRY_POINT_GROUP, Registered, Registry
from poros.run.device import resolve_device
from poros_cli.doctor import probes
from poros_cli.doctor.host import WSL_SPILL_HINT, host_facts
from poros_cli.doctor.versions import versions

__all__ = ["collect_facts"]


def collect_facts(plugins: Registry | PluginError, device_name: str, pin_probe_bytes: int) -> dict[str, Any]:
    """Return versions, host, devices, measurements, plugins, and in ``problems`` what stands in a run's way.

    Args:
        plugins: the registry, or why there is none.
        device_name: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``: what to measure on.
        pin_probe_bytes: how much host memory to page-lock at most.
    """
    host = host_facts()
    facts: dict[str, Any] = {"versions": versions(), "host": host, "devices": [], "device": None}
    problems: list[str] = []
    notes: list[str] = []
    try:
        facts["devices"] = probes.device_facts()
        device = resolve_device(device_name)
        facts["device"] = str(device)
    except (
        DeviceError,
        RuntimeError,
    ) as error:  # a broken driver shows as RuntimeError on the first CUDA call
        problems.append(str(error))
        device = torch.device("cpu")
    if device.type == "cuda":
        facts["link"] = _measured(problems, "link", lambda: probes.link_gigabytes_per_second(device))
        facts["pinning"] = _measured(
            problems, "page-locking", lambda: probes.pinnable(host["usable_bytes"], pin_probe_bytes)
        )
    else:
        facts["link"] = facts["pinning"] = None
        notes.append("No CUDA device in use: the CPU tier works, for tests and small models.")
    facts["nf4"] = probes.nf4_round_trip(device)
    if not facts["nf4"]["ok"]:
        problems.append(_nf4_problem(facts))
    facts["plugins"], broken = _plugin_facts(plugins)
    problems.extend(broken)
    if host["wsl"]:
        notes.append(WSL_SPILL_HINT)
    return {**facts, "notes": notes, "problems": problems}


def _measured(problems: list[str], what: str, measure: Any) -> Any:
    try:
        return measure()
    except (RuntimeError, OSError) as error:  # out of memory on a shared card, a refused mapping
        problems.append(f"Cannot measure the {what}: {type(error).__name__}: {error}.")
        return None


def _nf4_problem(facts: dict[str, Any]) -> str:
    known = facts["versions"]
    capability = ", ".join(device["compute_capability"] for device in facts["devices"]) or "none"
    return (
        f"NF4 does not work on `{facts['nf4']['device']}`: expected a 64 x 64 round trip through bitsandbytes, got "
        f"{facts['nf4']['error']} (bitsandbytes {known['bitsandbytes']}, torch {known['torch']} for CUDA "
        f"{known['torch_cuda']}, compute capability {capability}). Install a bitsandbytes that matches, or train with "
        "`quantization: bf16_bitwise`."
    )


def _plugin_facts(plugins: Registry | PluginError) -> tuple[list[dict[str, Any]], list[str]]:
    installed = [
        (entry.name, entry.dist.name if entry.dist else "unknown")
        for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    ]
    if isinstance(plugins, PluginError):
        return [_plugin(*key, "not loaded") for key in sorted(installed)], [str(plugins)]
    registered: dict[str, list[str]] = {}
    try:
        roles: dict[str, Mapping[str, Registered[Any]]] = {
            "architecture": plugins.architectures,
            "format": plugins.weight_formats,
            "command": plugins.commands(),
        }
    except PluginError as error:  # a hook that nobody had called yet
        return _plugin_facts(error)
    for role, values in roles.items():
        for name, entry in values.items():
            registered.setdefault(entry.distribution, []).append(f"{role} {name}")
    loaded = sorted((plugin.name, plugin.distribution) for plugin in plugins.plugins)
    facts = [
        _plugin(name, distribution, "loaded", registered.get(distribution)) for name, distribution in loaded
    ]
    left_out = f"left out by POROS_PLUGINS={os.environ.get('POROS_PLUGINS')}"
    return facts + [_plugin(*key, left_out) for key in sorted(installed) if key not in loaded], []


def _plugin(name: str, distribution: str, status: str, registers: list[str] | None = None) -> dict[str, Any]:
    return {"name": name, "distribution": distribution, "status": status, "registers": registers or []}
