"""Small sums that the training loop keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from poros.interfaces import MicroBatch, StepSource
from poros.run.events import StepEvent
from poros.run.prediction import StepShape

__all__ = ["Totals", "group_for_evaluation", "largest_step", "num_positions"]

# How many steps are looked at for the largest one; a long run is not read twice.
MAX_STEPS_LOOKED_AT = 512


@dataclass(slots=True)
class Totals:
    """Sums over the steps of this process, and the first and last loss."""

    tokens: int = 0
    supervised_tokens: int = 0
    seconds: float = 0.0
    h2d_bytes: int = 0
    exposed_copy_seconds: float = 0.0
    first_loss: float | None = None
    last_loss: float | None = None

    def add(self, event: StepEvent) -> None:
        """Count one step."""
        self.tokens += event.tokens
        self.supervised_tokens += event.supervised_tokens
        self.seconds += event.seconds
        self.h2d_bytes += event.h2d_bytes
        self.exposed_copy_seconds += event.exposed_copy_seconds
        self.first_loss = event.loss if self.first_loss is None else self.first_loss
        self.last_loss = event.loss


def num_positions(micro_batches: Sequence[MicroBatch]) -> int:
    """Return how many positions go through the blocks, padding included."""
    return sum(batch.input_ids.numel() for batch in micro_batches)


def largest_step(steps: StepSource) -> StepShape:
    """Return the shape of the step with the most positions among the first steps of a run."""
    largest = max(
        (steps.step(index) for index in range(min(steps.num_steps, MAX_STEPS_LOOKED_AT))), key=num_positions
    )
    widest = max(largest, key=lambda batch: batch.input_ids.numel())
    rows, tokens = widest.input_ids.shape
    return StepShape(num_micro_batches=len(largest), micro_batch_size=rows, tokens=tokens)


def group_for_evaluation(
    micro_batches: Sequence[MicroBatch], max_positions: int
) -> Iterator[list[MicroBatch]]:
    """Yield the micro-batches in order, in groups that need no more activations than a training step does."""
    group: list[MicroBatch] = []
    for batch in micro_batches:
        if group and num_positions([*group, batch]) > max_positions:
            yield group
            group = []
        group.append(batch)
    if group:
        yield group
