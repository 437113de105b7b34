"""The fixed addresses that visits read and write: hidden states, their gradient, masks and rotary tables per shape.

Shape letters: B batch, T tokens, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from poros.interfaces import BlockContext
from poros.model import LoadedModel

__all__ = ["MAX_CONTEXTS", "StaticState", "StaticStates"]

# Contexts (masks, rotary tables) are kept for this many shapes; length buckets keep the number of shapes small.
MAX_CONTEXTS = 16


@dataclass(frozen=True, slots=True)
class StaticState:
    """What a visit of one micro-batch works on.

    Attributes:
        hidden: (B, T, D) the block's input before a visit, its output after a forward visit.
        gradient: (B, T, D) of the block's output before a backward visit, of its input after it.
        context: masks, position ids and rotary tables.
    """

    hidden: torch.Tensor
    gradient: torch.Tensor
    context: BlockContext

    @property
    def key(self) -> tuple[object, ...]:
        """Changes whenever an address or a shape does."""
        return (*self.hidden.shape, self.hidden.data_ptr(), self.gradient.data_ptr())


class StaticStates:
    """One pair of buffers for every shape: only one micro-batch is visited at a time."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._hidden = torch.empty(0, device=model.device, dtype=model.numerics.compute_dtype)
        self._gradient = torch.empty_like(self._hidden)
        self._contexts: dict[tuple[int, int], BlockContext] = {}

    def get(self, shape: tuple[int, int]) -> StaticState:
        """Return the state of a (B, T) shape; its buffers grow to the largest one asked for."""
        full = (*shape, self._model.hidden_size)
        count = full[0] * full[1] * full[2]
        if count > self._hidden.numel():
            self._hidden, self._gradient = self._hidden.new_empty(count), self._gradient.new_empty(count)
        return StaticState(
            self._hidden[:count].view(full), self._gradient[:count].view(full), self._context(shape)
        )

    def _context(self, shape: tuple[int, int]) -> BlockContext:
        context = self._contexts.pop(shape, None)
        if context is None:
            context = self._model.make_context(*shape)
        self._contexts[shape] = context  # newest last
        if len(self._contexts) > MAX_CONTEXTS:
            del self._contexts[next(iter(self._contexts))]
        return context
