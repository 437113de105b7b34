"""The gate's words: what stands behind an architecture, and what its config means in effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from poros.architecture import ArchitectureVerdict
from poros.effective_config import TIED, EffectiveConfig
from poros.evidence import platform_status
from poros.units import ranges

__all__ = ["effective_record", "effective_rows", "verdict_record", "verdict_rows", "verdict_sentence"]

UNGATED = "none: no gate of Poros runs it; `poros.testing` is how its authors can"
WITHOUT_RECEIPTS = "none shipped: the gates of this project's CI run tiny models of it"


def verdict_record(verdict: ArchitectureVerdict, device: torch.device) -> dict[str, Any]:
    """Return the receipts behind a verdict and what they say of this platform, as plain data."""
    validated = verdict.status == "validated"
    return {
        "receipts": [asdict(receipt) for receipt in verdict.receipts],
        "platform": platform_status(verdict.receipts, device) if validated else UNGATED,
    }


def verdict_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the table rows of `verdict_record`, receipts grouped by where they were made."""
    if facts["status"] != "validated":
        return [("receipts", facts["platform"])]
    places: dict[str, list[str]] = {}
    for receipt in facts["receipts"]:
        where = f"{receipt['device_name']}, torch {receipt['torch']}"
        made = f"{receipt['claim']} of {receipt['subject']} ({receipt['weight_format']})"
        places.setdefault(where, []).append(made)
    lines = [f"{where}: {', '.join(made)}" for where, made in places.items()]
    return [("receipts", "\n".join(lines) or WITHOUT_RECEIPTS), ("this platform", facts["platform"])]


def verdict_sentence(verdict: ArchitectureVerdict, device: torch.device) -> str:
    """Say in one line what stands behind a run's architecture."""
    name = verdict.architecture.name
    if verdict.status != "validated":
        return f"`{name}` is user_asserted by `{verdict.distribution}`: receipts: {UNGATED}"
    count = len(verdict.receipts)
    return (
        f"`{name}` is validated by {count} receipt{'' if count == 1 else 's'} of this project; "
        f"{platform_status(verdict.receipts, device)}"
    )


def effective_record(effective: EffectiveConfig) -> dict[str, Any]:
    """Return what is in effect, as plain data."""
    return {
        "rotary_base": {kind: base for kind, (base, _) in effective.rotary.items()},
        "rotary_type": {kind: scaling for kind, (_, scaling) in effective.rotary.items()},
        "attention_windows": [
            {"tokens": window, "blocks": list(blocks)} for window, blocks in effective.windows
        ],
        "tied_head": effective.tied,
    }


def effective_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the table rows of `effective_record`."""
    bases = [
        f"{kind} {base:,.0f} ({facts['rotary_type'][kind]})" for kind, base in facts["rotary_base"].items()
    ]
    windows = [
        f"{'all' if group['tokens'] is None else group['tokens']} tokens in blocks {ranges(group['blocks'])}"
        for group in facts["attention_windows"]
    ]
    return [
        ("rotary base", "; ".join(bases) or "none stated"),
        ("attention reaches", "; ".join(windows)),
        ("head", TIED[facts["tied_head"]]),
    ]
