"""The shape of an optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StepShape"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """The micro-batches of the largest step: how many, and B and T of the widest.

    Attributes:
        total_positions: of the step, where its micro-batches differ; None where all are as wide as the widest.
        packed: rows hold several samples, so that every block has a mask.
        num_shapes, num_evaluation_shapes: different (B, T) of the whole run and of its evaluations; each is captured.
    """

    num_micro_batches: int
    micro_batch_size: int
    tokens: int
    total_positions: int | None = None
    packed: bool = False
    num_shapes: int = 1
    num_evaluation_shapes: int = 0

    @property
    def positions(self) -> int:
        """Positions of the widest micro-batch, padding included."""
        return self.micro_batch_size * self.tokens

    @property
    def step_positions(self) -> int:
        """Positions of the whole step, padding included."""
        return self.total_positions or self.num_micro_batches * self.positions

    @property
    def mean_positions(self) -> float:
        """Positions of a micro-batch on average."""
        return self.step_positions / self.num_micro_batches

    def positions_together(self, order: str) -> int:
        """Positions that are alive at once: the whole step where it is block-major, else the widest micro-batch."""
        return self.step_positions if order == "block-major" else self.positions
