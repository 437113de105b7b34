"""Which implementation Transformers calls where an installed package may replace its own."""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
from collections.abc import Collection, Iterator
from types import ModuleType
from typing import Any

__all__ = ["TORCH", "active_kernel", "torch_kernels"]

# Transformers' own implementation, in plain torch.
TORCH = "torch"
UNKNOWN = "unknown"


@contextlib.contextmanager
def torch_kernels(module: ModuleType, names: Collection[str]) -> Iterator[None]:
    """Let ``module`` call Transformers' own implementation of its replaceable functions ``names``, for a while."""
    bound = {name: getattr(module, name) for name in names}
    for name, function in bound.items():
        setattr(module, name, inspect.unwrap(function))
    try:
        yield
    finally:
        for name, function in bound.items():
            setattr(module, name, function)


def active_kernel(function: Any) -> str:
    """Return ``torch`` or ``distribution version`` of what runs when ``function`` is called.

    Transformers binds such a function to its implementation at import, whatever the device: flash-linear-attention or
    causal-conv1d where they are installed and import, its own otherwise.

    Args:
        function: a function of a Transformers modelling module that `use_kernel_func_from_hub_with_fallback` made.

    Returns:
        ``unknown`` where this version of Transformers keeps the implementation elsewhere.
    """
    closure = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    implementation = closure.get("implementation")
    module = getattr(implementation, "__module__", None)
    if module is None:
        return UNKNOWN
    package = module.partition(".")[0]
    if package == "transformers":
        return TORCH
    names = importlib.metadata.packages_distributions().get(package, [])
    return f"{names[0]} {importlib.metadata.version(names[0])}" if names else package
