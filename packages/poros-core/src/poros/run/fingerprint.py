"""What a checkpoint may be continued with: settings old and new, and which differences matter."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from poros.errors import ConfigError, explain

__all__ = ["compare_fingerprints", "flatten"]

# A difference in these would continue another model, another adapter or other data, or read moments of another kind.
FIXED = ("model", "quantization", "lora", "data", "seed", "optimizer.name")


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return a dataclass or mapping as ``section.name -> JSON value``."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        items = sorted(value.items())
    else:
        return {prefix: _plain(value)}
    flat: dict[str, Any] = {}
    for name, item in items:
        flat.update(flatten(item, f"{prefix}.{name}" if prefix else str(name)))
    return flat


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def compare_fingerprints(old: Mapping[str, Any], new: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Return every harmless difference as ``name: old -> new``.

    Raises:
        ConfigError: the model, the adapter's shape, meaning or start, the data, the seed or the kind of optimizer
            changed; each is listed.
    """
    changed = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    fixed = [name for name in changed if name in FIXED or name.split(".")[0] in FIXED]
    if fixed:
        listed = "; ".join(_difference(name, old, new) for name in fixed)
        raise ConfigError(
            explain(
                "Cannot resume with these settings",
                expected="the model, adapter, data, seed and kind of optimizer that the checkpoint was made with",
                got=listed,
                where=where,
                next_step="Give the old values to go on, or start anew in another `--output`",
            )
        )
    return tuple(_difference(name, old, new) for name in changed)


def _difference(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    return f"{name}: {old.get(name, '(none)')} -> {new.get(name, '(none)')}"
