"""The fixed addresses that visits read and write: hidden states and what accompanies them, gradients, masks and rotary
tables per shape.

Shape letters: B batch, T tokens, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from poros.blocks.kinds import BlockKind
from poros.engine.packed import PackedContext
from poros.interfaces import BlockContext, BlockStates
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
        specs: what else the block reads and writes.
        states: by name, (B, T, *sizes): what the block reads, its per-block input, and what it wrote after a forward
            visit.
        state_gradients: by name: of what the block writes before a backward visit, of what it reads after it.
    """

    hidden: torch.Tensor
    gradient: torch.Tensor
    context: BlockContext
    specs: BlockStates
    states: Mapping[str, torch.Tensor]
    state_gradients: Mapping[str, torch.Tensor]

    @property
    def key(self) -> tuple[object, ...]:
        """Changes whenever an address or a shape does."""
        tensors = (
            self.hidden,
            self.gradient,
            self.context.position_ids,  # stands for all of the context: they are made together
            *self.states.values(),
            *self.state_gradients.values(),
        )
        return (*self.hidden.shape, *(tensor.data_ptr() for tensor in tensors))


class StaticStates:
    """One set of buffers for every shape: only one micro-batch is visited at a time."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._flat: dict[str, torch.Tensor] = {}
        self._contexts: dict[tuple[int, int], BlockContext] = {}
        self._packed: dict[tuple[int, int], PackedContext] = {}

    def get(
        self, shape: tuple[int, int], kind: BlockKind, positions: torch.Tensor | None = None
    ) -> StaticState:
        """Return the state of a (B, T) shape and a kind; its buffers grow to the largest one asked for.

        Args:
            shape: of the micro-batch.
            kind: of the block.
            positions: (B, T) on the device where rows are packed: the context is filled for them.
        """
        hidden_size = self._model.hidden_size
        states, gradients = {}, {}
        for spec in (*kind.states.reads, *kind.states.writes):
            states[spec.name] = self._buffer(spec.name, (*shape, *spec.sizes))
            gradients[spec.name] = self._buffer(f"{spec.name} gradient", (*shape, *spec.sizes))
        if self._model.per_block is not None:
            spec = self._model.per_block.declared.spec
            states[spec.name] = self._buffer(spec.name, (*shape, *spec.sizes))
        return StaticState(
            hidden=self._buffer("hidden", (*shape, hidden_size)),
            gradient=self._buffer("hidden gradient", (*shape, hidden_size)),
            context=self.context(shape, positions),
            specs=kind.states,
            states=states,
            state_gradients=gradients,
        )

    def context(self, shape: tuple[int, int], positions: torch.Tensor | None = None) -> BlockContext:
        """Return masks, position ids and rotary tables of a (B, T) shape; see `get`."""
        return self._context(shape) if positions is None else self._packed_context(shape, positions)

    def _buffer(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        count = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.numel() < count:
            flat = torch.empty(count, device=self._model.device, dtype=self._model.numerics.compute_dtype)
            self._flat[name] = flat
        return flat[:count].view(shape)

    def _context(self, shape: tuple[int, int]) -> BlockContext:
        context = self._contexts.pop(shape, None)
        if context is None:
            context = self._model.make_context(*shape)
        self._contexts[shape] = context  # newest last
        if len(self._contexts) > MAX_CONTEXTS:
            del self._contexts[next(iter(self._contexts))]
        return context

    def _packed_context(self, shape: tuple[int, int], positions: torch.Tensor) -> BlockContext:
        packed = self._packed.pop(shape, None)
        if packed is None:
            packed = PackedContext(self._context(shape), shape[0])
        self._packed[shape] = packed  # newest last
        if len(self._packed) > MAX_CONTEXTS:
            del self._packed[next(iter(self._packed))]
        return packed.load(positions)
