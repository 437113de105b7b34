"""The engine: executes schedules over templates, slots, activations, loss and bank.

Shape letters: B batch, T tokens, D hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from poros.bank import StaticRegion
from poros.blocks.kinds import BlockKind
from poros.blocks.slots import CopyStatistics, Slots, make_slots
from poros.determinism import preserved_generator, visit_seed
from poros.engine.activations import BoundaryActivations
from poros.engine.embedding import check_token_ids
from poros.engine.loss import Targets, count_supervised, make_targets
from poros.engine.schedule import Loss, Op, Prefetch, Release, Schedule, ScheduleRequest, Visit, make_schedule
from poros.engine.template import BlockTemplate
from poros.errors import UserError, explain
from poros.interfaces import BlockContext, MicroBatch
from poros.model import LoadedModel
from poros.settings import Plan

__all__ = ["Engine", "StepOutput"]

# Contexts (masks, rotary tables) are kept for this many shapes; length buckets keep the number of shapes small.
MAX_CONTEXTS = 16


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one forward and backward over a step's micro-batches produced.

    Attributes:
        losses: per micro-batch, its share of the step's mean loss; float32 scalars on the device.
        supervised_tokens: the denominator.
    """

    losses: tuple[torch.Tensor, ...]
    supervised_tokens: int


@dataclass(slots=True)
class _Pass:
    """The state of one pass over the blocks."""

    step: int
    shapes: list[tuple[int, int]]
    embedded: list[torch.Tensor]
    targets: list[Targets]
    denominator: int
    training: bool
    losses: list[torch.Tensor]
    gradients: list[torch.Tensor | None]


class Engine:
    """Runs forward, loss and backward of a loaded model under a plan.

    The same visit code serves streamed and resident blocks; only which buffer a template is bound to differs.

    Attributes:
        model: the loaded model: store, kinds, bank, embedding, head.
        plan: placement.
        slots: the device slots, or None where every block is resident.
        seed: run seed of every dropout mask.
    """

    def __init__(self, model: LoadedModel, plan: Plan, *, seed: int) -> None:
        self.model = model
        self.plan = plan
        self.seed = seed
        self.device = model.device
        streamed = plan.residency == "streamed"
        # More slots than blocks would stay empty.
        num_slots = min(plan.num_slots, max(2, model.num_blocks))
        self.slots: Slots | None = make_slots(model.store, num_slots, self.device) if streamed else None
        self._resident = frozenset() if streamed else frozenset(range(model.num_blocks))
        self._kind_of = {block: kind for kind in model.kinds for block in kind.blocks}
        self._region = StaticRegion([kind.adapter for kind in model.kinds], self.device)
        self._templates: dict[tuple[int, int | None, int | None], BlockTemplate] = {}
        self._workspaces: dict[int, dict[str, torch.Tensor]] = {}
        self._contexts: dict[tuple[int, int], BlockContext] = {}
        self._activations = BoundaryActivations(
            model.num_blocks, model.hidden_size, self.device, model.numerics.compute_dtype
        )
        self._generator: torch.Generator | None = None

    # ---- passes

    def step(self, micro_batches: Sequence[MicroBatch], step: int) -> StepOutput:
        """Run forward, loss and backward of one optimizer step; gradients end in the bank.

        Args:
            micro_batches: right-padded rows; see `MicroBatch`.
            step: index of the optimizer step, part of every dropout seed.

        Raises:
            UserError: no position of the whole step is supervised, or a token is not in the vocabulary.
        """
        self.model.bank.zero_gradients()
        state = self._begin(micro_batches, step, training=True)
        if state.denominator == 0:
            raise UserError(
                explain(
                    f"Optimizer step {step} has nothing to learn from",
                    expected="at least one supervised token",
                    got="0",
                    next_step="Look at the rows with `poros data preview`, or raise `max_length`",
                )
            )
        self._run(state, lowest_backward=self.model.bank.lowest_adapted())
        return StepOutput(tuple(state.losses), state.denominator)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, int]:
        """Return (summed cross-entropy, supervised tokens) of a forward-only pass. Changes no training state."""
        state = self._begin(micro_batches, step=0, training=False)
        self._run(state, lowest_backward=None)
        return float(sum(loss.double() for loss in state.losses)), state.denominator

    def last_hidden(self, micro_batch: int) -> torch.Tensor:
        """Return the last block's (B, T, D) output in the pass that just ended; the next pass overwrites it."""
        return self._activations.input_of(self.model.num_blocks, micro_batch)

    def _begin(self, micro_batches: Sequence[MicroBatch], step: int, *, training: bool) -> _Pass:
        for micro_batch in micro_batches:
            check_token_ids(micro_batch, self.model.embedding.num_tokens)
        shapes = [(int(m.input_ids.shape[0]), int(m.input_ids.shape[1])) for m in micro_batches]
        self._activations.begin(shapes, together=self.plan.order == "block-major")
        return _Pass(
            step=step,
            shapes=shapes,
            embedded=[self.model.embedding.rows(m.input_ids) for m in micro_batches],
            targets=[make_targets(m.labels, self.device) for m in micro_batches],
            denominator=sum(count_supervised(m) for m in micro_batches),
            training=training,
            losses=[],
            gradients=[None] * len(micro_batches),
        )

    def _run(self, state: _Pass, lowest_backward: int | None) -> None:
        schedule = self.schedule(len(state.shapes), lowest_backward)
        for template in self._templates.values():
            template.set_training(state.training)
        try:
            with self._dropout(state.training):
                for op in schedule.ops:
                    self._execute(op, state)
        finally:
            # An aborted pass may leave copies in flight; the next pass starts from what the slots really hold.
            if self.slots is not None:
                self.slots.drain()

    def schedule(self, num_micro_batches: int, lowest_backward: int | None) -> Schedule:
        """Return the schedule of a pass that begins with the slots as they are now."""
        return make_schedule(
            ScheduleRequest(
                num_blocks=self.model.num_blocks,
                resident=self._resident,
                slots=tuple(self.slots.contents) if self.slots is not None else (),
                num_micro_batches=num_micro_batches,
                order=self.plan.order,
                lowest_backward=lowest_backward,
            )
        )

    @contextlib.contextmanager
    def _dropout(self, training: bool) -> Iterator[None]:
        """Lend the default generator to visit seeds: a block may draw from it in ways that cannot be seen here."""
        if not training:
            yield
            return
        with preserved_generator(self.device) as generator:
            self._generator = generator
            try:
                yield
            finally:
                self._generator = None

    # ---- operations

    def _execute(self, op: Op, state: _Pass) -> None:
        if isinstance(op, Visit):
            self._visit(op, state)
        elif isinstance(op, Loss):
            for micro_batch in op.micro_batches:
                self._loss(micro_batch, state)
        elif isinstance(op, Prefetch):
            assert self.slots is not None
            self.slots.prefetch(op.block, op.slot)
        elif isinstance(op, Release):
            assert self.slots is not None
            self.slots.release(op.slot)

    def _visit(self, visit: Visit, state: _Pass) -> None:
        template = self._template(visit.block, visit.slot, state.training)
        if visit.slot is not None:
            assert self.slots is not None
            self.slots.acquire(visit.slot)
        self.model.bank.load_weights(visit.block, self._region)
        template.materialize()
        if visit.direction == "forward":
            for micro_batch in visit.micro_batches:
                self._forward(template, visit.block, micro_batch, state)
        else:
            self._backward(template, visit, state)
        if __debug__:
            template.assert_bound()

    def _forward(self, template: BlockTemplate, block: int, micro_batch: int, state: _Pass) -> None:
        if block == 0:
            self._activations.input_of(0, micro_batch).copy_(state.embedded[micro_batch])
        hidden = self._activations.input_of(block, micro_batch)
        self._seed(state.step, micro_batch, block)
        output = template.forward(hidden, self._context(state.shapes[micro_batch]))
        self._activations.input_of(block + 1, micro_batch).copy_(output)

    def _backward(self, template: BlockTemplate, visit: Visit, state: _Pass) -> None:
        bank = self.model.bank
        adapted = bank.has_adapter(visit.block)
        if adapted:
            bank.load_gradients(visit.block, self._region)
        for micro_batch in visit.micro_batches:
            hidden = self._activations.input_of(visit.block, micro_batch)
            gradient = state.gradients[micro_batch]
            assert gradient is not None
            self._seed(state.step, micro_batch, visit.block)
            state.gradients[micro_batch] = template.backward(
                hidden, gradient, self._context(state.shapes[micro_batch])
            )
        if adapted:
            bank.store_gradients(visit.block, self._region)

    def _loss(self, micro_batch: int, state: _Pass) -> None:
        hidden = self._activations.input_of(self.model.num_blocks, micro_batch)
        head, targets = self.model.head, state.targets[micro_batch]
        if state.training:
            loss, gradient = head.loss_and_gradient(hidden, targets, state.denominator)
            state.gradients[micro_batch] = gradient
        else:
            loss = head.loss_sum(hidden, targets)
        state.losses.append(loss)

    def _seed(self, step: int, micro_batch: int, block: int) -> None:
        if self._generator is not None:
            self._generator.manual_seed(visit_seed(self.seed, step, micro_batch, block))

    # ---- bound modules

    def _template(self, block: int, slot: int | None, training: bool) -> BlockTemplate:
        kind = self._kind_of[block]
        if slot is not None:
            assert self.slots is not None
            assert self.slots.contents[slot] == block, f"slot {slot} holds block {self.slots.contents[slot]}"
        key = (id(kind), slot, block if slot is None else None)
        template = self._templates.get(key)
        if template is None:
            buffer = self.model.store.block(block) if slot is None else self.slots.buffers[slot]  # type: ignore[union-attr]
            template = BlockTemplate(
                kind,
                buffer,
                self._region,
                self.model.architecture,
                self.model.numerics.compute_dtype,
                self._workspace(kind) if self.plan.workspace else None,
                shared=(self.model.config,),
            )
            template.set_training(training)
            self._templates[key] = template
        return template

    def _workspace(self, kind: BlockKind) -> dict[str, torch.Tensor]:
        """Return the dequantization workspace of a kind; every template of the kind shares it."""
        if id(kind) not in self._workspaces:
            self._workspaces[id(kind)] = self.model.make_workspace(kind)
        return self._workspaces[id(kind)]

    def _context(self, shape: tuple[int, int]) -> BlockContext:
        context = self._contexts.pop(shape, None)
        if context is None:
            context = self.model.make_context(*shape)
        self._contexts[shape] = context  # newest last
        if len(self._contexts) > MAX_CONTEXTS:
            del self._contexts[next(iter(self._contexts))]
        return context

    # ---- reporting

    def take_statistics(self) -> CopyStatistics:
        """Return and reset what was copied; call where the device is idle."""
        return self.slots.take_statistics() if self.slots is not None else CopyStatistics()

    def close(self) -> None:
        """Wait for pending copies and release page locks."""
        if self.slots is not None:
            self.slots.drain()
        self.model.store.close()
