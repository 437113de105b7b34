"""Single visits for autograd: bring one block, run its forward or its recompute and backward, let the slot go.

The engine knows a whole pass in advance and follows a schedule; autograd asks for one block at a time, in an order that
only it knows. What it will ask for next is guessed, and a wrong guess costs a copy, never a bit: a visit runs on the
block that its slot holds, whatever was prefetched.

Shape letters: B batch, T tokens, D hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from poros.bank import StaticRegion
from poros.blocks.kinds import BlockKind
from poros.blocks.slots import Slots, make_slots
from poros.determinism import preserved_generator, visit_seed
from poros.engine.static_states import StaticStates
from poros.engine.template import BlockTemplate
from poros.engine.unread import unread_products
from poros.engine.workspace import Workspace
from poros.model import LoadedModel
from poros.settings import Plan

__all__ = ["BlockVisits", "VisitCall"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VisitCall:
    """Everything about a visit that its recompute must find unchanged, tensors apart.

    Attributes:
        block: which one.
        shape: (B, T) of the forward.
        positions: (B, T) on the device where rows are packed, else None.
        training: dropout is on.
        seed: of the forward, in training.
        dropouts: per LoRA layer of the block, its probability.
        has_adapter: the LoRA branches take part.
        reads: names of the states that the block is given.
    """

    block: int
    shape: tuple[int, int]
    positions: torch.Tensor | None
    training: bool
    seed: int
    dropouts: tuple[float, ...]
    has_adapter: bool
    reads: tuple[str, ...]


class BlockVisits:
    """Runs visits of a loaded model, one at a time.

    Attributes:
        model: store, kinds, embedding and head; its bank is not used.
        slots: the device slots, or None where every block is resident.

    Args:
        plan: residency, number of slots and workspace; nothing else of it applies to single visits.
    """

    def __init__(self, model: LoadedModel, plan: Plan) -> None:
        self.model = model
        self._streamed = [block for block in range(model.num_blocks) if block not in model.resident]
        num_slots = min(plan.num_slots, max(2, len(self._streamed)))
        self.slots: Slots | None = (
            make_slots(model.store, num_slots, model.device) if self._streamed else None
        )
        self._last_used = [0] * num_slots
        self._clock = 0
        self._kind_of = {block: kind for kind in model.kinds for block in kind.blocks}
        compute_dtype = model.numerics.compute_dtype
        self._region = StaticRegion([kind.adapter for kind in model.kinds], model.device, compute_dtype)
        self._workspace = Workspace(model.kinds, compute_dtype, model.device, per_visit=plan.workspace)
        self._templates: dict[tuple[int, int | None, int | None], BlockTemplate] = {}
        self._contexts = StaticStates(model)

    def kind(self, block: int) -> BlockKind:
        """Return the kind of a block."""
        return self._kind_of[block]

    def forward(
        self,
        call: VisitCall,
        hidden: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        adapter: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the block's (B, T, D) output and the states that it writes, in their declared order.

        Args:
            call: which visit.
            hidden: (B, T, D) the block's input.
            states: by name, what else it reads.
            adapter: its LoRA tensors in the order of the kind's signature; empty without an adapter.
        """
        with self._visit(call, adapter, direction=1) as template:
            context = self._contexts.context(call.shape, call.positions)
            output, written = template.forward(hidden, context, states)
        return output, tuple(written[spec.name] for spec in template.kind.states.writes)

    def backward(
        self,
        call: VisitCall,
        hidden: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        adapter: Sequence[torch.Tensor],
        grad_output: torch.Tensor,
        grad_written: Sequence[torch.Tensor],
        wanted: Sequence[str],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[torch.Tensor]]:
        """Recompute the block and return the gradients of its input, of ``wanted`` states and of its adapter.

        Everything that is returned is memory of its own.
        """
        with self._visit(call, adapter, direction=-1) as template:
            for gradient in self._region.gradients.values():
                gradient.zero_()
            context = self._contexts.context(call.shape, call.positions)
            names = [spec.name for spec in template.kind.states.writes]
            grad_states = dict(zip(names, grad_written, strict=True))
            grad_hidden, grads = template.backward(hidden, grad_output, context, states, grad_states, wanted)
            signature = template.kind.adapter.tensors if call.has_adapter else ()
            return grad_hidden, grads, [self._region.gradient(tensor).clone() for tensor in signature]

    @contextlib.contextmanager
    def _visit(
        self, call: VisitCall, adapter: Sequence[torch.Tensor], *, direction: int
    ) -> Iterator[BlockTemplate]:
        device = self.model.device
        on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        try:
            with on_device, torch.no_grad(), self._seeded(call):
                slot = self._onload(call.block, direction)
                template = self._template(call.block, slot)
                template.set_training(call.training)
                template.set_adapter(enabled=call.has_adapter, dropouts=call.dropouts)
                for tensor, value in zip(template.kind.adapter.tensors, adapter, strict=False):
                    self._region.weight(tensor).copy_(value)
                template.materialize()
                yield template
                if __debug__:
                    template.assert_bound()
                if slot is not None:
                    assert self.slots is not None
                    self.slots.release(slot)
        except BaseException:
            self._drain()
            raise

    @contextlib.contextmanager
    def _seeded(self, call: VisitCall) -> Iterator[None]:
        """Draw the recompute's dropout masks as the forward drew them, and leave the generator as it was."""
        if not call.training:
            yield
            return
        with preserved_generator(self.model.device) as generator:
            generator.manual_seed(visit_seed(call.seed, 0, 0, call.block))
            yield

    # ---- slots

    def _onload(self, block: int, direction: int) -> int | None:
        """Bring a block and start the copies of its neighbours in ``direction``; return its slot."""
        if self.slots is None or block in self.model.resident:
            return None
        if block not in self.slots.contents:
            self._prefetch(block, keep=())
        slot = self.slots.contents.index(block)
        self._touch(slot)
        self.slots.acquire(slot)
        place = self._streamed.index(block)
        reach = len(self.slots.buffers) - 1
        ahead = self._streamed[place + 1 : place + 1 + reach]
        if direction < 0:
            ahead = self._streamed[max(0, place - reach) : place][::-1]
        for neighbour in ahead:
            if neighbour not in self.slots.contents:
                self._prefetch(neighbour, keep=(block, *ahead))
        return slot

    def _prefetch(self, block: int, *, keep: Sequence[int]) -> None:
        """Copy a block over the one that was not needed for longest."""
        assert self.slots is not None
        free = [slot for slot, held in enumerate(self.slots.contents) if held not in keep]
        slot = min(free, key=lambda slot: self._last_used[slot])
        self.slots.prefetch(block, slot)
        self._touch(slot)

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._last_used[slot] = self._clock

    def _template(self, block: int, slot: int | None) -> BlockTemplate:
        kind = self._kind_of[block]
        key = (id(kind), slot, block if slot is None else None)
        if key not in self._templates:
            model = self.model
            self._templates[key] = BlockTemplate(
                kind,
                model.store.block(block) if slot is None else self.slots.buffers[slot],  # type: ignore[union-attr]
                self._region,
                model.architecture,
                model.numerics.compute_dtype,
                self._workspace,
                shared=(model.config,),
                unread=unread_products(model.meta, kind),
            )
        return self._templates[key]

    # ---- end

    def _drain(self) -> None:
        if self.slots is not None:
            self.slots.drain()
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    def close(self) -> None:
        """Wait for pending copies and release page locks."""
        self._drain()
        if self.slots is not None:
            self.slots.close()
        for table in self.model.token_tables:
            table.close()
        self.model.store.close()
