"""Whether a run fits into memory, asked before anything is loaded: a message beats the kernel's killer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil
import torch

from poros.errors import BudgetError, explain
from poros.run.control_group import control_group_memory
from poros.run.prediction import Prediction

__all__ = ["available_host_bytes", "check_device_memory", "check_host_memory", "format_bytes", "list_terms"]


def format_bytes(count: float) -> str:
    """Return bytes for people, in the largest binary unit that keeps a digit before the point."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def available_host_bytes(root: Path = Path("/")) -> tuple[int, str]:
    """Return how much more host memory this process may take, and what limits it.

    The limit of the control group counts besides what the machine has free: a container sees the whole machine's
    memory and is killed at its own limit.
    """
    available, limit = psutil.virtual_memory().available, "free memory of this machine"
    allowed, used = control_group_memory(root)
    if allowed is not None and allowed - (used or 0) < available:
        available = max(0, allowed - (used or 0))
        limit = "memory limit of this container or control group"
    return available, limit


def check_host_memory(prediction: Prediction, device: torch.device) -> None:
    """Raise `BudgetError` if the run needs more host memory than there is; the largest term is named."""
    terms = dict(prediction.host)
    if device.type == "cpu":
        for name, count in prediction.device.items():
            terms[name] = terms.get(name, 0) + count
    available, limit = available_host_bytes()
    _check(
        terms, available, what="host memory", limit=limit, next_step="Free some memory or use a smaller model"
    )


def check_device_memory(prediction: Prediction, budget_bytes: int, limit: str) -> None:
    """Raise `BudgetError` if the predicted peak is above ``budget_bytes``; the largest term is named."""
    _check(
        prediction.device,
        budget_bytes,
        what="device memory",
        limit=limit,
        next_step="Lower `micro_batch_size`, `max_length` or `plan.slots`, or raise the budget",
    )


def list_terms(terms: Mapping[str, int]) -> str:
    """Return the terms with their sizes, largest first."""
    ordered = sorted(terms.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {format_bytes(count)}" for name, count in ordered if count)


def _check(terms: Mapping[str, int], available: int, *, what: str, limit: str, next_step: str) -> None:
    needed = sum(terms.values())
    if needed <= available:
        return
    largest = max(terms, key=lambda name: terms[name])
    raise BudgetError(
        explain(
            f"Not enough {what} for this run",
            expected=f"{format_bytes(needed)}, mostly {largest}",
            got=f"{format_bytes(available)}",
            where=f"{limit}; predicted: {list_terms(terms)}",
            next_step=next_step,
        )
    )
