"""The figures of docs/guarantees.md, read from the receipts; cog writes them, nobody else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from poros_cli.verify.run import NEEDS_GPU

RECEIPTS = Path(__file__).parent / "receipts"
PREFIX = "../validation/receipts/"


def every_plan() -> str:
    """Return what the drawn plans came to, one clause per receipt."""
    return "; ".join(
        f"{r['draws']} draws, {r['draws_from_disk']} of them with blocks from the disk, {r['distinct_plans']} "
        f"different plans, {r['settings']} settings of "
        f"{len(r['families'])} families, {r['different']} different ({_link(name, _device(r))})"
        for name, r in _receipts("every-plan-*.json")
    )


def verified() -> str:
    """Return the verdicts of `poros verify`, one clause per receipt."""
    return "; ".join(
        ", ".join(f"{check['name']} {check['outcome']}" for check in r["checks"])
        + f" ({_link(name, _device(r))})"
        for name, r in _receipts("verify-*.json")
    )


def faults() -> str:
    """Return how many faults were caught, one clause per receipt."""
    clauses = []
    for name, receipt in _receipts("verify-*.json"):
        controls = receipt["controls"]
        tried = [control["caught"] is True for control in controls if NEEDS_GPU not in control["got"]]
        left = f", {len(controls) - len(tried)} need a GPU" if len(tried) < len(controls) else ""
        clauses.append(f"{sum(tried)} of {len(tried)} caught{left} ({_link(name, _device(receipt))})")
    return "; ".join(clauses)


def disk_rate() -> str:
    """Return what the ring got from a disk beside plain reads, medians and ranges, one clause per receipt."""

    def said(receipt: dict[str, Any], way: str) -> str:
        found = receipt["gb_per_second"][way]
        return f"{found['median']:.2f} GB/s ({found['least']:.2f} to {found['most']:.2f})"

    def best(receipt: dict[str, Any]) -> str:
        return max(("plain", "plain_direct"), key=lambda way: receipt["gb_per_second"][way]["median"])

    return "; ".join(
        f"{said(r, 'ring')} through the ring, {said(r, best(r))} by the better sequential read of the same "
        f"{r['store_bytes'] / 1e9:.1f} GB, {said(r, 'ring_first_pass')} while every block is hashed "
        f"({_link(name, _device(r))})"
        for name, r in _receipts("disk-rate*.json")
    )


def real_sizes() -> str:
    """Return how many real shapes were compared at full size on a GPU."""
    found = [r for _, r in _receipts("residency-*.json")]
    verdicts = [v["verdict"] for r in found for n, v in r["results"].items() if n.startswith("streamed")]
    shapes = len({receipt["shape"] for receipt in found})
    return (
        f"{verdicts.count('equal')} of {len(verdicts)} plans of {shapes} shapes equal "
        "([table](../validation/README.md#residency-at-real-sizes))"
    )


def crashes() -> str:
    """Return how many kills were survived."""
    return "; ".join(
        f"{m['kills']} kills at {m['points']} different points, {m['equal']} of "
        f"{m['equal'] + len(m['broken'])} runs equal after, "
        f"{m['bytes_lost']} bytes lost ({_link(name, _device(r))})"
        for name, r in _receipts("crashes.json")
        for m in (r["measured"],)
    )


def full_disks() -> str:
    """Return how many full disks were survived."""
    return "; ".join(
        f"{m['full']} full disks, {m['tmpfs_full']} of them real: {m['stopped_with_a_message']} runs stopped with a "
        f"message, {m['finished_with_a_warning']} went on; {m['equal']} equal after, {m['bytes_lost']} bytes lost "
        f"({_link(name, _device(r))})"
        for name, r in _receipts("full-disk.json")
        for m in (r["measured"],)
    )


def starved() -> str:
    """Return how runs without enough of something ended."""
    clauses = []
    for name, receipt in _receipts("starvation.json"):
        answers = [value for value in receipt["measured"].values() if isinstance(value, dict)]
        limits = [answer for values in answers for answer in values.values()]
        finished, refused, ran_out = (limits.count(answer) for answer in ("equal", "refused", "ran out"))
        clauses.append(
            f"{len(limits)} memory limits: {finished} runs equal, {refused} refused, {ran_out} stopped by a message "
            f"when memory ran out, {len(limits) - finished - refused - ran_out} killed "
            f"({_link(name, _device(receipt))})"
        )
    return "; ".join(clauses)


def garbage() -> str:
    """Return what became of the damaged inputs, one clause per receipt."""
    return "; ".join(
        f"{r['num_inputs']} inputs of {len(r['kinds'])} kinds: {r['works']} work, {r['refused']} refused, "
        f"{len(r['bugs'])} anything else; {r['files_changed_outside']} files changed outside, "
        f"{r['code_executed']} times code executed, at most {r['slowest_cpu_seconds']:.1f} s for one "
        f"({_link(name, _device(r))})"
        for name, r in _receipts("garbage.json")
    )


def _receipts(pattern: str) -> list[tuple[str, dict[str, Any]]]:
    return [(path.name, json.loads(path.read_text())) for path in sorted(RECEIPTS.glob(pattern))]


def _device(receipt: dict[str, Any]) -> str:
    environment = receipt["environment"]
    return f"{environment['device_name']}, torch {environment['versions']['torch']}"


def _link(name: str, text: str) -> str:
    return f"[{text}]({PREFIX}{name})"


ROWS = (
    (
        "Streamed = resident: where blocks live changes no bit of your run",
        "`poros verify` on your own config; the parity gates of every architecture; real shapes at full depth",
        "`verify`, `parity-*`",
        lambda: f"{verified()}; {real_sizes()}",
        "other devices, versions or kernels than those compared; weight formats that claim nothing",
    ),
    (
        "Every placement knob: slots, resident and kept blocks, blocks from the disk, head, activations, order, "
        "workspace, page locks, graphs",
        "plans, rows, dtypes, dropout and NEFTune are drawn over tiny models of every family; "
        "one state hash per setting; wrong bytes from the disk must be found by the draws; on a CPU graphs and page "
        "locks have nothing to act on",
        "`every-plan`",
        every_plan,
        "settings of `numerics`: these decide bits and belong to the run",
    ),
    (
        "Blocks from the disk are those that were written, and change no bit",
        "every block's hash is checked when it first comes and when its file changes; flipped, cut, removed and "
        "unreadable files, a full disk, a read-only cache and two runs over one cache in the tests; residency gates "
        "with blocks on the disk in every architecture; a ring that refills too early must be caught",
        "`parity-*`",
        disk_rate,
        "a disk that answers with other bytes and the same size and time of change, after its first read",
    ),
    (
        "The checks can fail: each fault that streaming invites is caught",
        "`poros verify --inject all`; controls of every gate",
        "`verify`, `parity-*`",
        faults,
        "faults that nobody has thought of",
    ),
    (
        "A killed run is continued with the bits of the run that nobody killed, under another plan or budget too",
        "SIGKILL at chosen file calls, half of a write included, and by the clock: steps, evaluations, saves, pruning, "
        "caches, the final adapter; then `--resume`",
        "`crashes`",
        crashes,
        "a power failure on a disk that says written before it is, and lines of `metrics.jsonl` then",
    ),
    (
        "A full disk costs a message: earlier checkpoints are whole, nothing is half-written, `--resume` goes on",
        "ENOSPC at every write of a run and ever after; real file systems that are full before a save",
        "`full-disk`",
        full_disks,
        "waiting for space: the run ends",
    ),
    (
        "Without enough memory, page locks, cache or an output of its own a run ends with the same bits or refuses",
        "limits of the process and of real control groups; a read-only cache; two runs that make one cache; an output "
        "that is in use; page locks and device memory that are refused (GPU tests; the one of device memory has not "
        "passed yet)",
        "`starvation`",
        starved,
        "other programs that take memory after the start; locks on file systems that have none",
    ),
    (
        "Garbage is refused: a damaged or forged file works, or gives one message and exit code 2; it cannot drive an "
        "allocation, a hang or a write elsewhere, and nothing in it is executed",
        "models, configs, adapters, checkpoints, caches, rows, templates and records are damaged by a seeded "
        "generator; each is read under a time and a memory limit and an audit hook",
        "`garbage`",
        garbage,
        "a regular expression inside a `tokenizer.json` may be slow; templates are bounded in the main thread of "
        "Linux and macOS alone; whoever can write to your output or cache folder can replace what is in it",
    ),
)


def table() -> str:
    """Return the table of promises."""
    head = "| promise | how it is tested | session | figure | not promised |\n|---|---|---|---|---|"
    lines = [
        f"| {what} | {how} | {session} | {figure()} | {limits} |"
        for what, how, session, figure, limits in ROWS
    ]
    return "\n".join([head, *lines])
