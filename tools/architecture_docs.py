"""The generated parts of docs/plugins.md and docs/architecture-support.md; cog writes them, nobody else."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable

from poros.architecture import GATED_DISTRIBUTIONS
from poros.evidence import receipts_of
from poros.interfaces import Architecture
from poros.plugins import load_registry
from poros.testing import CLAUSES

__all__ = ["architectures", "clauses", "methods"]


def architectures() -> str:
    """Return one row per architecture that this project gates: types, default targets, receipts."""
    lines = [
        "| architecture | `model_type` | package | default LoRA targets | residency receipts | reference receipts |",
        "|---|---|---|---|---|---|",
    ]
    for name, registered in load_registry().architectures.items():
        if registered.distribution not in GATED_DISTRIBUTIONS:
            continue
        architecture = registered.value
        claims = Counter(receipt.claim for receipt in receipts_of(architecture()))
        types = ", ".join(f"`{model_type}`" for model_type in architecture.model_types)
        targets = ", ".join(f"`{target}`" for target in architecture.default_targets)
        counts = f"{claims['residency'] or 'none yet'} | {claims['reference'] or 'none yet'}"
        lines.append(f"| `{name}` | {types} | `{registered.distribution}` | {targets} | {counts} |")
    return "\n".join(lines)


def clauses() -> str:
    """Return the contract's clauses in the order in which the kit examines them."""
    lines = ["| clause | what must hold |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {demand} |" for name, demand in CLAUSES.items())])


def methods() -> str:
    """Return the exact signature of everything that a subclass of `Architecture` may define, with its first line."""
    parts = []
    for name, value in vars(Architecture).items():
        if name.startswith("_") or not inspect.isfunction(value):
            continue
        signature = _signature(value)
        must = "must be defined" if getattr(value, "__isabstractmethod__", False) else "has a default"
        summary = (inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " ")
        parts.append(f"```text\ndef {name}{signature}    # {must}\n```\n{summary}\n")
    return "\n".join(parts).rstrip()


def _signature(function: Callable[..., object]) -> str:
    text = str(inspect.signature(function)).replace("'", "")
    return re.sub(r"\b(?:torch\.nn\.modules\.module|collections\.abc)\.", "", text)
