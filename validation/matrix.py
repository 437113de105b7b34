"""The tables of README.md and validation/README.md, made from the receipts; cog writes them, nobody else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECEIPTS = Path(__file__).parent / "receipts"
ORDER = (
    *("qwen2.5-7b", "qwen2.5-32b", "qwen2.5-72b", "qwen3-8b", "qwen3-32b", "qwen3.5-27b"),
    *("gemma-3-12b", "gemma-3-27b", "gemma-4-e2b", "gemma-4-31b"),
)
BEST_PLAN = "streamed, 3 slots, block-major, workspace"
SMALLEST_PLAN = "streamed, 2 slots, block-major"


def receipts() -> list[tuple[str, dict[str, Any]]]:
    """Return (file name, content) of every residency receipt, by shape and format."""
    found = [(path.name, json.loads(path.read_text())) for path in RECEIPTS.glob("residency-*.json")]
    return sorted(found, key=lambda item: (ORDER.index(item[1]["shape"]), item[1]["weight_format"] != "nf4"))


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f}"


def _link(name: str, text: str, prefix: str) -> str:
    return f"[{text}]({prefix}receipts/{name})"


def parity_matrix(prefix: str = "") -> str:
    """Return one row per receipt: what was compared, and every verdict and control.

    Args:
        prefix: path from the page to this folder.
    """
    lines = [
        "| shape | blocks | format | streamed = resident | resident repeats | controls caught | `MatMul4Bit` fault: "
        "loss equal, gradient cosine / visit equal | link | receipt |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, receipt in receipts():
        results = receipt["results"]
        streamed = [r["verdict"] for n, r in results.items() if n.startswith("streamed")]
        controls = [r["verdict"] for n, r in results.items() if n.startswith("control")]
        caught = f"{controls.count('different')} of {len(controls)}" if controls else "not run"
        fault = results.get("aliasing")
        aliasing = (
            f"{fault['output_equal']}, {fault['faulty_gradient_cosine']:.3f} / {fault['visit_equal']}"
            if fault
            else "-"
        )
        depth = f"{receipt['num_blocks']}{'' if receipt['full_depth'] else ' (cut)'}"
        verdict = f"{streamed.count('equal')} of {len(streamed)} plans"
        lines.append(
            f"| {receipt['shape']} | {depth} | {receipt['weight_format']} | {verdict} | "
            f"{results['resident']['repeats']} | {caught} | {aliasing} | "
            f"{receipt['link_bytes_per_second'] / 1e9:.1f} GB/s | {_link(name, 'JSON', prefix)} |"
        )
    return "\n".join(lines)


def cost_table(prefix: str = "", shapes: tuple[str, ...] = ORDER) -> str:
    """Return what streaming cost where steps were timed: eight micro-batches of 512 tokens."""
    lines = [
        "| shape (NF4) | mode | step | tokens/s | peak device | H2D a step | exposed copy | parity |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, receipt in receipts():
        if receipt["shape"] not in shapes:
            continue
        depth = "" if receipt["full_depth"] else f", {receipt['num_blocks']} blocks"
        for mode in ("resident", BEST_PLAN, SMALLEST_PLAN):
            result = receipt["results"].get(mode, {})
            large = result.get("large_step")
            if large is None:
                continue
            parity = "oracle" if mode == "resident" else f"bitwise {result['verdict']}"
            lines.append(
                f"| {_link(name, receipt['shape'] + depth, prefix)} | {mode} | {large['step_seconds']:.2f} s | "
                f"{large['tokens_per_second']:.0f} | {_gb(large['peak_device_bytes'])} GB | "
                f"{_gb(large['h2d_bytes_per_step'])} GB | {large['exposed_copy_seconds'] * 1000:.1f} ms | {parity} |"
            )
    return "\n".join(lines)


def reference_table() -> str:
    """Return the distance to the unpatched loop, one row per case and device."""
    lines = [
        "| device | case | largest difference of a step's loss | smallest cosine of first gradients "
        "| of all steps | receipt |",
        "|---|---|---|---|---|---|",
    ]
    for path in sorted(RECEIPTS.glob("reference-*.json")):
        receipt = json.loads(path.read_text())
        for name, found in receipt["results"].items():
            first = found.get("first_gradient_cosine")  # older receipts do not hold it
            lines.append(
                f"| {receipt['environment']['device']} | {name} | {found['max_loss_difference']:.1e} | "
                f"{'-' if first is None else f'{first:.7f}'} | {found['min_gradient_cosine']:.7f} | "
                f"{_link(path.name, 'JSON', '')} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    print(parity_matrix(), cost_table(), sep="\n\n")
