"""Reading bench receipts, and what rows say together. Nothing here measures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECEIPTS = Path(__file__).parents[1] / "receipts"
SYSTEMS = {
    "poros-streamed": "Poros streamed",
    "poros-resident": "Poros resident",
    "peft": "PEFT resident",
    "unsloth": "Unsloth resident",
    "soup": "Soup streamed",
}
PEERS = ("peft", "unsloth", "soup")
BUDGETS_GB = (3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 40, 48)
# Streamed counts as free of cost from here on.
EQUAL_SLOWDOWN = 1.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """One bench receipt.

    Attributes:
        file: its name, for links.
        row: what was asked for.
        result: what was measured; holds ``error`` where nothing was.
    """

    file: str
    row: dict[str, Any]
    result: dict[str, Any]
    environment: dict[str, Any]

    @property
    def measured(self) -> bool:
        """Whether there is a step time that counts: no error, no ablation."""
        return "step_seconds" in self.result and not self.row["without"]

    @property
    def peak_bytes(self) -> int:
        """Peak of the whole process on the device."""
        return int(self.result["peak_device_bytes"])

    @property
    def tokens_per_step(self) -> int:
        """Positions of one optimizer step."""
        return int(self.result["tokens_per_step"])


def read_receipts(folder: Path = RECEIPTS) -> list[Receipt]:
    """Return every bench receipt made on a GPU, by name."""
    found = []
    for path in sorted(folder.glob("bench-*.json")):
        content = json.loads(path.read_text())
        if content["environment"]["device"].startswith("cuda"):
            found.append(
                Receipt(
                    file=path.name,
                    row={"without": "", **content["row"]},
                    result=content["result"],
                    environment=content["environment"],
                )
            )
    return found


def select(receipts: Sequence[Receipt], **wanted: Any) -> list[Receipt]:
    """Return the receipts whose rows have these values; ``shape`` and ``case`` name the case's."""
    chosen = receipts
    for key, value in wanted.items():
        if key in ("case", "shape"):
            field = "name" if key == "case" else "shape"
            chosen = [r for r in chosen if r.row["case"][field] == value]
        else:
            chosen = [r for r in chosen if r.row[key] == value]
    return list(chosen)


def best(receipts: Sequence[Receipt]) -> Receipt | None:
    """Return the fastest measured one."""
    return min(
        (r for r in receipts if r.measured), key=lambda r: float(r.result["step_seconds"]), default=None
    )


def resident_of(receipts: Sequence[Receipt], streamed: Receipt) -> Receipt | None:
    """Return the resident receipt with the case, numerics and depth of a streamed one."""
    found = select(
        receipts,
        case=streamed.row["case"]["name"],
        system="poros-resident",
        blocks=streamed.row["blocks"],
        num_blocks=streamed.row["num_blocks"],
        label="",
    )
    return best(found)


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """The best setting of a system within a budget."""

    budget_gb: float
    tokens_per_second: float
    receipt: Receipt


def frontier(
    receipts: Sequence[Receipt], shape: str, systems: Sequence[str], budgets_gb: Sequence[float] = BUDGETS_GB
) -> list[FrontierPoint]:
    """Return tokens/s against the budget: at each one, the best full-depth NF4 setting whose peak fits."""
    usable = [
        r
        for r in select(receipts, shape=shape, num_blocks=None)
        if r.measured and r.row["system"] in systems and r.row["case"]["quantization"] == "nf4"
    ]
    points = []
    for budget in budgets_gb:
        fitting = [r for r in usable if r.peak_bytes <= budget * 1e9]
        if fitting:
            chosen = max(fitting, key=lambda r: float(r.result["tokens_per_second"]))
            points.append(FrontierPoint(budget, float(chosen.result["tokens_per_second"]), chosen))
    return points


def slowdowns(receipts: Sequence[Receipt], shape: str, blocks: str) -> list[tuple[int, float, Receipt]]:
    """Return (tokens per step, streamed / resident) with nothing resident, best per number of tokens."""
    found: dict[int, tuple[float, Receipt]] = {}
    for streamed in select(receipts, shape=shape, system="poros-streamed", blocks=blocks, num_blocks=None):
        resident = resident_of(receipts, streamed)
        nf4 = streamed.row["case"]["quantization"] == "nf4"
        if (
            not (streamed.measured and nf4)
            or resident is None
            or streamed.row["label"].startswith("ablation")
        ):
            continue
        if streamed.result["plan"]["resident_blocks"]:
            continue
        ratio = float(streamed.result["step_seconds"] / resident.result["step_seconds"])
        tokens = streamed.tokens_per_step
        if tokens not in found or ratio < found[tokens][0]:
            found[tokens] = ratio, streamed
    return [(tokens, ratio, receipt) for tokens, (ratio, receipt) in sorted(found.items())]


def break_even_tokens(receipts: Sequence[Receipt], shape: str, blocks: str) -> float | None:
    """Return the tokens per step from which the link needs less than the resident step: there streaming can hide.

    Derived, not measured: bytes of a fully streamed step over the measured link, against resident seconds per token at
    the largest measured step, times the slowdown that counts as none.
    """
    streamed = [r for _, _, r in slowdowns(receipts, shape, blocks)]
    if not streamed:
        return None
    largest = streamed[-1]
    resident = resident_of(receipts, largest)
    assert resident is not None
    link_seconds = min(r.result["h2d_bytes_per_step"] / r.result["link_bytes_per_second"] for r in streamed)
    per_token = resident.result["step_seconds"] / resident.tokens_per_step
    return float(link_seconds / EQUAL_SLOWDOWN / per_token)
