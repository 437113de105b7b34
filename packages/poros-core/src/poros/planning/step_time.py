"""The predicted time of an optimizer step: the schedule's copies against the blocks' compute."""

from __future__ import annotations

from dataclasses import dataclass

from poros.blocks.placement import place_blocks
from poros.engine.loss import is_fused
from poros.engine.schedule import Schedule
from poros.planning.device_terms import head_chunk_bytes, kept_blocks, num_slots
from poros.planning.facts import ModelFacts
from poros.planning.rates import Rates
from poros.planning.shape import StepShape
from poros.planning.timeline import Durations, play, steady_schedule
from poros.planning.visit_cost import VisitCost, loss_seconds, optimizer_seconds, visit_cost
from poros.settings import Numerics, Plan

__all__ = ["StepTime", "pass_durations", "predict_step_time"]

# On a busy link, rows and head chunks that come from the host arrive later than the timeline has them: with both there,
# 1.2 to 1.4 times as much copy time was left open as predicted (7B and 32B, 512 tokens, H200: the receipts of commit
# 6f53ffe in validation/receipts); with both on the device 1.0 to 1.1 times.
EXPOSED_WITH_HOST_ROWS = 1.35


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """A predicted optimizer step.

    Attributes:
        seconds: of the whole step.
        compute_seconds: what it would take without any copy.
        link_seconds: how long the host-to-device link is busy.
        h2d_bytes: what crosses it.
        disk_seconds: how long the disk is busy.
        disk_bytes: what comes from it.
        tokens: positions of the step, padding included.
    """

    seconds: float
    compute_seconds: float
    link_seconds: float
    h2d_bytes: int
    tokens: int
    disk_seconds: float = 0.0
    disk_bytes: int = 0

    @property
    def exposed_seconds(self) -> float:
        """Time of copies and reads that compute does not hide."""
        return self.seconds - self.compute_seconds

    @property
    def tokens_per_second(self) -> float:
        """Positions per second."""
        return self.tokens / self.seconds


def pass_durations(
    facts: ModelFacts, rates: Rates, numerics: Numerics, plan: Plan, shape: StepShape, device_type: str
) -> tuple[Schedule, Durations, int]:
    """Return the schedule of one pass, how long its parts take, and how many passes make a step."""
    together = shape.num_micro_batches if plan.order == "block-major" else 1
    resident, on_disk = place_blocks(plan, facts.num_blocks)
    costs: dict[int, tuple[VisitCost, int]] = {}
    for kind in facts.kinds:
        cost = visit_cost(
            kind,
            facts,
            rates=rates,
            numerics=numerics,
            plan=plan,
            shape=shape,
            device_type=device_type,
        )
        costs |= dict.fromkeys(kind.blocks, (cost, kind.block_bytes))
    blocks = range(facts.num_blocks)
    # The tables of packed rows change with every micro-batch, so those are recomputed.
    kept = frozenset() if shape.packed else kept_blocks(facts, plan)
    row_bytes = shape.mean_positions * together * facts.hidden * facts.compute_bytes
    host_rows = plan.activations == "host"
    chunks = head_chunk_bytes(facts, numerics, plan)
    fused = is_fused(numerics.blocks, device_type)
    head = loss_seconds(facts, rates, shape.mean_positions * together, fused=fused)
    link = rates.link_bytes_per_second
    durations = Durations(
        copy=[
            *(costs[block][1] / link for block in blocks),
            *(count / link for count in chunks),
        ],
        forward=[
            cost.kept_forward_seconds if block in kept else cost.forward_seconds
            for block, (cost, _) in sorted(costs.items())
        ],
        backward=[
            cost.kept_backward_seconds if block in kept else cost.backward_seconds
            for block, (cost, _) in sorted(costs.items())
        ],
        loss=0.0 if chunks else head,
        head=head / len(chunks) if chunks else 0.0,
        row_out=row_bytes / rates.return_bytes_per_second if host_rows else 0.0,
        row_in=row_bytes / link if host_rows else 0.0,
        disk={block: costs[block][1] / rates.disk_bytes_per_second for block in sorted(on_disk)},
    )
    slots = num_slots(facts, plan, len(chunks))
    schedule = steady_schedule(facts.num_blocks, resident, slots, facts.lowest_adapted, len(chunks))
    return schedule, durations, shape.num_micro_batches // together


def predict_step_time(
    facts: ModelFacts, rates: Rates, numerics: Numerics, plan: Plan, shape: StepShape, device_type: str
) -> StepTime:
    """Predict a step of ``shape`` under ``plan``.

    Micro-batch-major steps are taken as one pass after another, each beginning with an idle link: a little pessimistic.
    """
    schedule, durations, passes = pass_durations(facts, rates, numerics, plan, shape, device_type)
    played = play(schedule, durations)
    after = optimizer_seconds(facts, rates)
    link_seconds = passes * played.link_seconds
    exposed = played.seconds - played.compute_seconds
    if durations.row_out or durations.head:
        exposed *= EXPOSED_WITH_HOST_ROWS
    return StepTime(
        seconds=passes * (played.compute_seconds + exposed) + after,
        compute_seconds=passes * played.compute_seconds + after,
        link_seconds=link_seconds,
        h2d_bytes=round(link_seconds * rates.link_bytes_per_second),
        tokens=shape.step_positions,
        disk_seconds=passes * played.disk_seconds,
        disk_bytes=round(passes * played.disk_seconds * rates.disk_bytes_per_second),
    )
