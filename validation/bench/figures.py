"""The figures of docs/performance.md, from receipts: `python validation/bench/figures.py` writes them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bench_receipts import SYSTEMS, Receipt, best, frontier, read_receipts, select, slowdowns
from svg import Chart, Line, draw

FOLDER = Path(__file__).parents[2] / "docs" / "figures"
SHAPES = ("7b", "32b")
# Poros is one system: its planner keeps every block resident where the budget allows.
FRONTIER = {"Poros": ("poros-streamed", "poros-resident")} | {
    SYSTEMS[peer]: (peer,) for peer in ("peft", "unsloth", "soup")
}


def charts(receipts: Sequence[Receipt]) -> dict[str, Chart]:
    """Return the charts that the receipts have numbers for, by file name."""
    made: dict[str, Chart] = {}
    lines = [
        Line(f"{shape}, {blocks} blocks", [(tokens, ratio) for tokens, ratio, _ in found])
        for shape in SHAPES
        for blocks in ("eager", "compiled")
        if (found := slowdowns(receipts, shape, blocks))
    ]
    if lines:
        made["slowdown.svg"] = Chart(
            title="What streaming costs: streamed over resident step time, no block resident",
            x_label="tokens per optimizer step",
            y_label="times the resident step",
            lines=lines,
            log_x=True,
        )
    lines = [Line(shape, points) for shape in SHAPES if (points := _budget_points(receipts, shape))]
    if lines:
        made["budget.svg"] = Chart(
            title="512 tokens a step: step time against the peak of the whole process",
            x_label="peak device memory, GB",
            y_label="seconds per step",
            lines=lines,
        )
    for shape in SHAPES:
        lines = [
            Line(
                name, [(p.budget_gb, p.tokens_per_second) for p in points], steps=True, dashed=name != "Poros"
            )
            for name, systems in FRONTIER.items()
            if (points := frontier(receipts, shape, systems))
        ]
        if lines:
            made[f"frontier-{shape}.svg"] = Chart(
                title=f"{shape}: tokens/s within a budget, each system at its best measured setting",
                x_label="device memory budget, GB",
                y_label="tokens per second",
                lines=lines,
            )
    return made


def _budget_points(receipts: Sequence[Receipt], shape: str) -> list[tuple[float, float]]:
    """Return (peak GB, seconds) of every 512-token step, without those that take more memory for no less time."""
    rows = [
        r
        for r in select(receipts, case=f"{shape}-512", num_blocks=None, blocks="eager")
        if r.measured and r.row["system"].startswith("poros") and not r.row["label"].startswith("ablation")
    ]
    points: list[tuple[float, float]] = []
    for receipt in sorted(rows, key=lambda r: r.peak_bytes):
        fastest = best([r for r in rows if r.peak_bytes <= receipt.peak_bytes])
        if fastest is receipt:
            points.append((receipt.peak_bytes / 1e9, float(receipt.result["step_seconds"])))
    return points


def main() -> int:
    """Write every figure; remove those that have no numbers any more."""
    made = charts(read_receipts())
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("*.svg"):
        if old.name not in made:
            old.unlink()
    for name, chart in made.items():
        (FOLDER / name).write_text(draw(chart))
    print(f"{len(made)} figures in {FOLDER.relative_to(Path.cwd())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
