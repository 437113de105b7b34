"""Small sums that the training loop keeps."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from poros.interfaces import MicroBatch, StepSource
from poros.planning.shape import StepShape
from poros.run.events import StepEvent

__all__ = ["Totals", "group_for_evaluation", "num_positions", "shape_of", "survey_steps"]

# How many steps are looked at for the largest one; a long run is not read twice.
MAX_STEPS_LOOKED_AT = 4096
# How many times of the largest steps are kept for their median.
MAX_LARGEST_STEPS = 1024


@dataclass(slots=True)
class Totals:
    """Sums over the steps of this process, the first and last loss, and how long its largest steps took."""

    tokens: int = 0
    supervised_tokens: int = 0
    seconds: float = 0.0
    h2d_bytes: int = 0
    exposed_copy_seconds: float = 0.0
    first_loss: float | None = None
    last_loss: float | None = None
    largest_tokens: int = 0
    largest_seconds: list[float] = field(default_factory=list)

    def add(self, event: StepEvent) -> None:
        """Count one step."""
        self.tokens += event.tokens
        self.supervised_tokens += event.supervised_tokens
        self.seconds += event.seconds
        self.h2d_bytes += event.h2d_bytes
        self.exposed_copy_seconds += event.exposed_copy_seconds
        self.first_loss = event.loss if self.first_loss is None else self.first_loss
        self.last_loss = event.loss
        if event.tokens > self.largest_tokens:
            self.largest_tokens, self.largest_seconds = event.tokens, []
        if event.tokens == self.largest_tokens and len(self.largest_seconds) < MAX_LARGEST_STEPS:
            self.largest_seconds.append(event.seconds)

    def median_seconds(self) -> float | None:
        """Return the median time of the steps with the most positions; None without a step."""
        return statistics.median(self.largest_seconds) if self.largest_seconds else None


def num_positions(micro_batches: Sequence[MicroBatch]) -> int:
    """Return how many positions go through the blocks, padding included."""
    return sum(batch.input_ids.numel() for batch in micro_batches)


def survey_steps(
    steps: StepSource, evaluation: Sequence[MicroBatch]
) -> tuple[tuple[MicroBatch, ...], StepShape]:
    """Return micro-batches that need as much memory as any step of a run, and what the planner must know about them.

    They are the largest step's, with the widest micro-batch of all, held-out ones included: these only run forward, but
    an evaluation that does not fit would otherwise fail when the training is done. Of a very long run the first steps
    are looked at.
    """
    largest: Sequence[MicroBatch] = ()
    widest: MicroBatch | None = None
    shapes = set()
    for index in range(min(steps.num_steps, MAX_STEPS_LOOKED_AT)):
        micro_batches = steps.step(index)
        largest = max(largest, micro_batches, key=num_positions)
        for batch in micro_batches:
            shapes.add(tuple(batch.input_ids.shape))
            if widest is None or _positions(batch) > _positions(widest):
                widest = batch
    assert widest is not None, "a step source without a step"
    widest = max(widest, *evaluation, key=_positions) if evaluation else widest
    place = max(range(len(largest)), key=lambda index: _positions(largest[index]))
    together = (*largest[:place], widest, *largest[place + 1 :])
    shape = replace(
        shape_of(together),
        total_positions=num_positions(together),
        num_shapes=len(shapes),
        num_evaluation_shapes=len({tuple(batch.input_ids.shape) for batch in evaluation}),
    )
    return together, shape


def shape_of(micro_batches: Sequence[MicroBatch]) -> StepShape:
    """Return the shape of a step, as if every micro-batch were as wide as its widest."""
    rows, tokens = max(micro_batches, key=_positions).input_ids.shape
    packed = any(getattr(batch, "position_ids", None) is not None for batch in micro_batches)
    return StepShape(
        num_micro_batches=len(micro_batches), micro_batch_size=rows, tokens=tokens, packed=packed
    )


def _positions(batch: MicroBatch) -> int:
    return batch.input_ids.numel()


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
