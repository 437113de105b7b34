"""The tables of docs/performance.md, from bench receipts; cog writes them, nobody else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_receipts import (
    BUDGETS_GB,
    EQUAL_SLOWDOWN,
    PEERS,
    SYSTEMS,
    Receipt,
    best,
    break_even_tokens,
    frontier,
    read_receipts,
    resident_of,
    select,
    slowdowns,
)
from figures import FOLDER, FRONTIER, SHAPES, charts

NOTHING = "No bench receipt of a GPU is on record yet: run `validation/bench/run_all.py` on a GPU machine."
LINK = "../validation/receipts/"
# Rows of the table of targets are those that have one; these systems stand beside them.
OTHERS = ("poros-resident", *PEERS)


# Steps of the README's table, and what they are called there.
HEADLINES = {
    "512": "512",
    "2048": "one sequence of 2048",
    "8x512": "one micro-batch of 8 x 512",
    "8mb": "8 micro-batches of 512",
}


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _seconds(receipt: Receipt | None, link: str = LINK) -> str:
    if receipt is None:
        return "-"
    if "error" in receipt.result:
        return f"[{receipt.result['error']['kind']}]({link}{receipt.file})"
    seconds, gb = receipt.result["step_seconds"], receipt.peak_bytes / 1e9
    return f"[{seconds:.3f} s, {gb:.2f} GB]({link}{receipt.file})"


def _target(value: float | None, target: float | None, unit: str) -> str:
    if target is None:
        return "-"
    met = "met" if value is not None and value <= target else "missed"
    return f"<= {target:g} {unit}: {met}"


def _case(receipt: Receipt) -> str:
    case = receipt.row["case"]
    step = f"{case['micro_batches']} x {case['micro_batch_size']} x {case['tokens']}"
    depth = f", {receipt.row['num_blocks']} blocks" if receipt.row["num_blocks"] else ""
    label = f", {receipt.row['label']}" if receipt.row["label"] else ""
    return f"{case['shape']}{depth}, {step} tokens, {receipt.row['blocks']}{label}"


def _streamed(receipts: Sequence[Receipt]) -> list[Receipt]:
    found = select(receipts, system="poros-streamed", without="")
    kept = [r for r in found if not r.row["label"].startswith("ablation")]
    return sorted(kept, key=lambda r: (_order(r), r.row["blocks"], r.row["label"]))


def _peer(receipts: Sequence[Receipt], case: str, system: str) -> Receipt | None:
    """Return a peer's fastest receipt of a case, or one that says why there is none."""
    found = select(receipts, case=case, system=system)
    return best(found) or next(iter(found), None)


def _order(receipt: Receipt) -> tuple[int, int]:
    case = receipt.row["case"]
    tokens = case["micro_batches"] * case["micro_batch_size"] * case["tokens"]
    return ("7b", "32b", "72b").index(case["shape"]), tokens


def provenance(receipts: Sequence[Receipt] | None = None) -> str:
    """Return on what the receipts were made."""
    receipts = read_receipts() if receipts is None else receipts
    if not receipts:
        return NOTHING
    names = ("torch", "transformers", "peft", "bitsandbytes")
    made = sorted(
        {
            f"{r.environment['device_name']}, driver {r.environment.get('driver')}, "
            + ", ".join(f"{name} {r.environment['versions'].get(name)}" for name in names)
            + f", commit {r.environment['commit']}"
            for r in receipts
        }
    )
    return "\n".join(f"- {line}" for line in made)


def steps_table(receipts: Sequence[Receipt] | None = None) -> str:
    """Return every streamed row beside the resident run and the peers at the same step."""
    receipts = read_receipts() if receipts is None else receipts
    rows = []
    for streamed in _streamed(receipts):
        result, row = streamed.result, streamed.row
        seconds = result.get("step_seconds")
        peak = result.get("peak_device_bytes")
        resident = resident_of(receipts, streamed)
        peers = [_peer(receipts, row["case"]["name"], peer) for peer in PEERS]
        rows.append(
            [
                _case(streamed),
                _seconds(streamed),
                _target(seconds, row["target_seconds"], "s"),
                _target(peak and peak / 1e9, row["target_gb"], "GB"),
                _seconds(resident),
                *map(_seconds, peers),
            ]
        )
    if not rows:
        return NOTHING
    header = ["case", SYSTEMS["poros-streamed"], "time", "memory", *(SYSTEMS[name] for name in OTHERS)]
    return _table(header, rows)


def headline_table(receipts: Sequence[Receipt] | None = None, link: str = "validation/receipts/") -> str:
    """Return a few lines for the README: each step's fastest streamed run with a memory target beside the others."""
    receipts = read_receipts() if receipts is None else receipts
    rows = []
    for shape in SHAPES:
        for step, words in HEADLINES.items():
            found = select(receipts, case=f"{shape}-{step}", num_blocks=None)
            own = [r for r in found if r.row["target_gb"] is not None and r.row["system"] == "poros-streamed"]
            if (streamed := best(own)) is None:
                continue
            others = [best(select(found, system=name)) for name in (*PEERS, "poros-resident")]
            rows.append([f"{shape}, {words}", *(_seconds(r, link) for r in [*others, streamed])])
    header = ["tokens per step", *(SYSTEMS[name] for name in (*PEERS, "poros-resident", "poros-streamed"))]
    return _table(header, rows) if rows else NOTHING


def bound_table(receipts: Sequence[Receipt] | None = None) -> str:
    """Return how near each streamed step is to what link and GPU allow, and how good its prediction was."""
    receipts = read_receipts() if receipts is None else receipts
    rows = []
    for streamed in _streamed(receipts):
        resident, r = resident_of(receipts, streamed), streamed.result
        if not streamed.measured:
            continue
        link = r["h2d_bytes_per_step"] / r["link_bytes_per_second"]
        floor = resident.result["step_seconds"] if resident else None
        payload = r.get("store_payload_bytes")
        store = r["store_allocated_bytes"] / payload if payload else None
        rows.append(
            [
                _case(streamed),
                f"{r['step_seconds']:.3f} s",
                f"{link:.3f} s",
                "-" if floor is None else f"{floor:.3f} s",
                "-" if floor is None else f"{max(link, floor) / r['step_seconds']:.0%}",
                "-" if floor is None else f"{r['step_seconds'] / floor:.3f}",
                f"{r['exposed_copy_seconds'] * 1000:.0f} ms",
                _ratio(r, "device_bytes", streamed.peak_bytes),
                _ratio(r, "step_seconds", r["step_seconds"]),
                "-" if store is None else f"{store:.3f}",
                f"{r['peak_host_bytes'] / 1e9:.1f} GB",
            ]
        )
    if not rows:
        return NOTHING
    header = [
        *("case", "step", "link floor", "compute floor", "share of the bound", "times resident", "stall"),
        *("predicted / measured peak", "predicted / measured step", "store / payload", "host"),
    ]
    return _table(header, rows)


def _ratio(result: Mapping[str, Any], name: str, measured: float) -> str:
    """Return predicted over measured; some records hold no prediction."""
    predicted = result.get("predicted", {}).get(name)
    return "-" if predicted is None else f"{predicted / measured:.2f}"


def checks_table(receipts: Sequence[Receipt] | None = None) -> str:
    """Return the verdict of every residency check."""
    receipts = read_receipts() if receipts is None else receipts
    rows = [
        [
            _case(check),
            "replayed" if check.row["oracle_graphs"] else "launch by launch",
            str(check.result.get("num_steps", "-")),
            f"[{check.result.get('verdict') or check.result['error']['kind']}]({LINK}{check.file})",
        ]
        for check in sorted(select(receipts, system="check"), key=lambda r: (_order(r), r.file))
    ]
    return _table(["case", "resident run", "steps", "streamed = resident"], rows) if rows else NOTHING


def frontier_table(shape: str, receipts: Sequence[Receipt] | None = None) -> str:
    """Return tokens/s of each system at each budget, at its best measured setting that fits."""
    receipts = read_receipts() if receipts is None else receipts
    by_system = {
        name: {point.budget_gb: point for point in frontier(receipts, shape, systems)}
        for name, systems in FRONTIER.items()
    }
    if not any(by_system.values()):
        return NOTHING
    rows = []
    for budget in BUDGETS_GB:
        cells = []
        for points in by_system.values():
            point = points.get(budget)
            if point is None:
                cells.append("-")
            else:
                case = point.receipt.row["case"]["name"].partition("-")[2]
                cells.append(f"{point.tokens_per_second:.0f} ([{case}]({LINK}{point.receipt.file}))")
        rows.append([f"{budget} GB", *cells])
    return _table(["budget", *by_system], rows)


def break_even_list(receipts: Sequence[Receipt] | None = None) -> str:
    """Return per shape what streaming costs at each measured step, and from where on it costs nothing."""
    receipts = read_receipts() if receipts is None else receipts
    lines = []
    for shape in SHAPES:
        for blocks in ("eager", "compiled"):
            found = slowdowns(receipts, shape, blocks)
            if not found:
                continue
            measured = ", ".join(f"{tokens} tokens: {ratio:.3f}" for tokens, ratio, _ in found)
            tokens = break_even_tokens(receipts, shape, blocks)
            lines.append(
                f"- {shape}, {blocks} blocks: {measured}. By its link and compute rates, streaming is within "
                f"{EQUAL_SLOWDOWN} of resident from about {tokens:.0f} tokens a step."
            )
    return "\n".join(lines) or NOTHING


def ablation_table(receipts: Sequence[Receipt] | None = None) -> str:
    """Return what each cost is worth: the step without it, and the difference."""
    receipts = read_receipts() if receipts is None else receipts
    rows = []
    for shape in SHAPES:
        for mode, words in (("graphs", "graphs replayed"), ("launches", "kernels launched one by one")):
            full = _ablation(receipts, shape, mode, "poros-streamed")
            if full is None:
                continue
            row = [f"{_case(full).partition(', eager')[0]}, {words}", _seconds(full)]
            without = [
                _ablation(receipts, shape, mode, "poros-resident"),
                _ablation(receipts, shape, f"{mode}-stale", "poros-streamed"),
                _ablation(receipts, shape, "graphs", "poros-streamed") if mode == "launches" else None,
            ]
            rows.append(row + [_difference(full, other) for other in without])
    if not receipts:
        return NOTHING
    if not rows:
        return "The ablation has not been measured: `validation/bench/run_all.py ablation` does it."
    return _table(["case", "all of it", "without copies", "without dequantization", "without launches"], rows)


def _ablation(receipts: Sequence[Receipt], shape: str, mode: str, system: str) -> Receipt | None:
    return best_timed(select(receipts, shape=shape, system=system, label=f"ablation-{mode}"))


def best_timed(receipts: Sequence[Receipt]) -> Receipt | None:
    """Return the fastest with a step time, valid run or not."""
    timed = [r for r in receipts if "step_seconds" in r.result]
    return min(timed, key=lambda r: float(r.result["step_seconds"]), default=None)


def _difference(full: Receipt, other: Receipt | None) -> str:
    if other is None:
        return "-"
    less = 1 - other.result["step_seconds"] / full.result["step_seconds"]
    return f"[{other.result['step_seconds']:.3f} s]({LINK}{other.file}) ({-less:+.0%})"


def figure_links(receipts: Sequence[Receipt] | None = None) -> str:
    """Return the figures that exist, as Markdown images."""
    made = charts(read_receipts() if receipts is None else receipts)
    return "\n\n".join(f"![{chart.title}]({FOLDER.name}/{name})" for name, chart in made.items()) or NOTHING


def page_facts() -> dict[str, Any]:
    """Return everything that the page shows, for a test that no table fails on the receipts at hand."""
    return {
        "provenance": provenance(),
        "steps": steps_table(),
        "bound": bound_table(),
        "checks": checks_table(),
        "ablation": ablation_table(),
        "break even": break_even_list(),
        "figures": figure_links(),
        **{f"frontier {shape}": frontier_table(shape) for shape in SHAPES},
    }


if __name__ == "__main__":
    folder = Path(__file__).parent
    print("\n\n".join(f"{name}\n{text}" for name, text in page_facts().items()))
