"""The shape of an optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StepShape"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """The micro-batches of the largest step: how many, and B and T of each.

    Attributes:
        num_shapes, num_evaluation_shapes: different (B, T) of the whole run and of its evaluations; each is captured.
    """

    num_micro_batches: int
    micro_batch_size: int
    tokens: int
    num_shapes: int = 1
    num_evaluation_shapes: int = 0

    @property
    def positions(self) -> int:
        """Positions of one micro-batch, padding included."""
        return self.micro_batch_size * self.tokens

    @property
    def step_positions(self) -> int:
        """Positions of the whole step."""
        return self.num_micro_batches * self.positions
