"""What `poros verify` shows: one line per check, a table of faults, a last line that says it all."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from poros.parity.compare import Verdict
from poros_cli.plan_text import plan_sentence
from poros_cli.verify.run import CANNOT_COMPARE, ControlOutcome, Verification

__all__ = ["difference_sentence", "show_verification"]

KINDS = {
    "rows": "rows that were read",
    "losses": "loss",
    "gradients": "gradient",
    "grad_norm": "gradient norm",
    "weights": "adapter weight",
    "exp_avg": "first moment",
    "exp_avg_absmax": "scale of the first moment",
    "exp_avg_sq": "second moment",
    "exp_avg_sq_absmax": "scale of the second moment",
    "rng": "random state",
    "position": "data position",
}
COLOURS = {"equal": "green", "different": "red", "cannot compare": "yellow"}


def difference_sentence(verdict: Verdict) -> str:
    """Return where two runs part, with optimizer steps counted from 1 as in ``metrics.jsonl``."""
    found = verdict.difference
    if found is None:
        return verdict.detail
    if found.quantity == "losses":
        where = f" of micro-batch {found.index[0] + 1}" if found.index else ""
    elif found.block is not None:
        where = f" of block {found.block}, {found.tensor}{list(found.index)}"
    else:
        where = f", {found.where}" if found.where else ""
    a, b = found.values
    also = f", {found.count} values differ" if found.count > 1 else ""
    return f"first difference in step {found.step + 1}: {KINDS[found.quantity]}{where}: {a} against {b}{also}"


def show_verification(found: Verification, console: Console) -> None:
    """Print plans, verdicts, faults and the conclusion."""
    console.print()
    for name in ("streamed", "streamed-cut", "resident"):
        side = found.sides.get(name)
        if side and "plan" in side:
            console.print(Text(f"{name}: {plan_sentence(side['plan'], side['num_blocks'])}"))
    console.print()
    table = Table(box=None, padding=(0, 2), show_header=False)
    for check in found.checks:
        verdict = check.verdict
        steps = f"steps {check.first + 1} to {check.last}"
        table.add_row(
            Text(verdict.outcome, style=COLOURS[verdict.outcome]),
            Text(f"{check.what}: {steps}, {verdict.num_tensors} tensors compared"),
        )
        if verdict.outcome != "equal":
            table.add_row("", Text(difference_sentence(verdict)))
    console.print(table)
    if found.controls:
        console.print()
        console.print(_fault_table(found.controls))
        for outcome in found.controls:
            for got, detail in zip(
                outcome.got, outcome.details, strict=False
            ):  # none of a fault that was not tried
                if got == CANNOT_COMPARE:
                    console.print(Text(f"{outcome.control.name}: {detail}"))
    console.print()
    console.print(Text(conclusion(found), style="bold"))


def _fault_table(controls: list[ControlOutcome]) -> Table:
    table = Table(box=None, padding=(0, 2))
    for name in ("fault", "expected", "got", "caught"):
        table.add_column(name, no_wrap=name != "got")
    for outcome in controls:
        caught = {True: "yes", False: "NO", None: "unknown" if outcome.tried else "not tried"}[outcome.caught]
        table.add_row(
            outcome.control.name,
            ", then ".join(outcome.expected),
            ", then ".join(outcome.got) if outcome.tried else outcome.got[0],
            Text(caught, style={True: "green", False: "red", None: "yellow"}[outcome.caught]),
        )
    return table


def conclusion(found: Verification) -> str:
    """Return the outcome in one line."""
    outcomes = [check.verdict.outcome for check in found.checks]
    if "different" in outcomes:
        text = "DIFFERENT: please report this, with the receipt"
    elif "cannot compare" in outcomes:
        text = "CANNOT COMPARE"
    else:
        text = "EQUAL, byte for byte"
    tried = [outcome for outcome in found.controls if outcome.tried]
    if found.controls:
        text += f"; {sum(bool(o.caught) for o in tried)} of {len(tried)} faults caught"
        if unknown := sum(o.caught is None for o in tried):
            text += f", {unknown} could not be compared"
        if untried := len(found.controls) - len(tried):
            text += f", {untried} not tried: these need a GPU"
    return f"{text}."
