"""The shape of an optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StepShape"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """The micro-batches of the largest step: how many, and B and T of each."""

    num_micro_batches: int
    micro_batch_size: int
    tokens: int

    @property
    def positions(self) -> int:
        """Positions of one micro-batch, padding included."""
        return self.micro_batch_size * self.tokens

    @property
    def step_positions(self) -> int:
        """Positions of the whole step."""
        return self.num_micro_batches * self.positions
