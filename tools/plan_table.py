"""The table of plans in docs/planning.md."""

from __future__ import annotations

from collections.abc import Sequence

from poros.planning.planner import make_plan
from poros.planning.rates import ASSUMED_RATES
from poros.planning.request import Budget
from poros.planning.shape import StepShape
from poros.run import describe_model
from poros.settings import Numerics
from poros.units import GB
from poros_arch_qwen.real_shapes import real_config

__all__ = ["plan_table"]

HEADER = (
    "vram",
    "slots",
    "resident blocks",
    "head",
    "activations",
    "workspace",
    "predicted peak",
    "predicted step",
    "binds",
)
SHAPE = StepShape(num_micro_batches=1, micro_batch_size=1, tokens=512)


def plan_table(shape: str, budgets_gb: Sequence[float]) -> str:
    """Return what the planner chooses for a published model shape under budgets in GB, as Markdown."""
    config = real_config(shape)
    _, _, meta = describe_model(config)
    rows = [HEADER, ("---",) * len(HEADER)]
    for gb in budgets_gb:
        budget = Budget(device_bytes=int(gb * GB), frugal=False)
        planned = make_plan(meta, Numerics(), SHAPE, budget, ASSUMED_RATES)
        plan = planned.plan
        rows.append(
            (
                f"{gb:g} GB",
                str(plan.num_slots),
                f"{plan.resident_blocks} of {config.num_hidden_layers}",
                plan.head,
                plan.activations,
                "yes" if plan.workspace else "no",
                f"{planned.prediction.device_bytes / GB:.2f} GB",
                f"{planned.time.seconds:.3f} s",
                planned.binding,
            )
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
