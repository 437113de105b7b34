"""What blocks hand on besides hidden states, for every micro-batch of a pass: written states, their gradients, inputs.

All of it stays on the device under every plan: it is small next to the hidden states at every boundary.

Shape letters: B batch, T tokens, L blocks, P elements of a per-block input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from poros.engine.activations import Rows, Shape
from poros.engine.static_states import StaticState
from poros.interfaces import StateSpec
from poros.model import LoadedModel

__all__ = ["PassStates"]


class PassStates:
    """The states of one pass, in flat buffers that grow to the largest pass.

    A state's gradient is the sum of its readers' in its own dtype, in descending block order, as autograd adds it over
    a whole graph: the first one is copied, so that not even a sign of zero differs.

    Attributes:
        with_gradient: states whose writer has a backward visit; nobody asks for a gradient of the others.

    Args:
        model: states and their writers follow from it.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        lowest = model.bank.lowest_adapted()
        self.with_gradient = frozenset(
            name for name, block in model.meta.state_writers.items() if block >= lowest
        )
        self._flat: dict[tuple[str, str], torch.Tensor] = {}
        self._shapes: list[Shape] = []
        self._together = False
        self._layouts: dict[int, Rows] = {}  # elements per position -> where micro-batches lie
        self._summed: set[tuple[str, int]] = set()

    def begin(self, shapes: Sequence[Shape], *, together: bool) -> None:
        """Start a pass over micro-batches of these (B, T) shapes; see `BoundaryActivations.begin`."""
        self._shapes, self._together = list(shapes), together
        self._layouts.clear()
        self._summed.clear()

    def _rows(self, kind: str, name: str, width: int, micro_batch: int) -> torch.Tensor:
        """Return a micro-batch's flat part, (B, T, width) elements."""
        rows = self._layouts.get(width)
        if rows is None:
            rows = self._layouts[width] = Rows(self._shapes, width, together=self._together)
        flat = self._flat.get((kind, name))
        if flat is None or flat.numel() < rows.size:
            flat = torch.empty(rows.size, device=self._model.device, dtype=self._model.numerics.compute_dtype)
            self._flat[kind, name] = flat
        return rows.view(flat, micro_batch)

    def _view(self, kind: str, spec: StateSpec, micro_batch: int) -> torch.Tensor:
        return self._rows(kind, spec.name, spec.width, micro_batch).unflatten(-1, spec.sizes)

    def _inputs(self, micro_batch: int) -> torch.Tensor:
        """Return the (L, B, T, P) inputs of all blocks: a block's own part lies together."""
        per_block = self._model.per_block
        assert per_block is not None
        spec, num_blocks = per_block.declared.spec, self._model.num_blocks
        rows = self._rows("input", spec.name, num_blocks * spec.width, micro_batch)
        return rows.view(num_blocks, *self._shapes[micro_batch], spec.width)

    def enter_model(self, input_ids: torch.Tensor, hidden: torch.Tensor, micro_batch: int) -> None:
        """Make every block's input from (B, T) ids on the CPU and the (B, T, D) states that enter block 0."""
        if self._model.per_block is not None:
            mixed = self._model.per_block.inputs(input_ids, hidden)
            self._inputs(micro_batch).copy_(mixed.permute(2, 0, 1, 3))

    def load(self, block: int, micro_batch: int, static: StaticState) -> None:
        """Copy what a visit reads to its fixed addresses."""
        for spec in static.specs.reads:
            static.states[spec.name].copy_(self._view("value", spec, micro_batch))
        if self._model.per_block is not None:
            name = self._model.per_block.declared.spec.name
            static.states[name].copy_(self._inputs(micro_batch)[block])

    def keep(self, micro_batch: int, static: StaticState) -> None:
        """Keep what a forward visit wrote."""
        for spec in static.specs.writes:
            self._view("value", spec, micro_batch).copy_(static.states[spec.name])

    def load_gradients(self, micro_batch: int, static: StaticState) -> None:
        """Copy the summed gradients of what a backward visit recomputes to their fixed addresses."""
        for spec in static.specs.writes:
            assert (spec.name, micro_batch) in self._summed, f"no reader of `{spec.name}` was visited"
            static.state_gradients[spec.name].copy_(self._view("gradient", spec, micro_batch))

    def add_gradients(self, micro_batch: int, static: StaticState) -> None:
        """Add the gradients of what a backward visit read; its block lies below the one before it."""
        for spec in static.specs.reads:
            if spec.name not in self.with_gradient:
                continue
            total = self._view("gradient", spec, micro_batch)
            if (spec.name, micro_batch) in self._summed:
                total.add_(static.state_gradients[spec.name])
            else:
                total.copy_(static.state_gradients[spec.name])
                self._summed.add((spec.name, micro_batch))
