"""The engine: executes schedules over templates, slots, activations, loss and bank.

Shape letters: B batch, T tokens, D hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from poros.bank import StaticRegion
from poros.blocks.slots import CopyStatistics, Slots, make_slots
from poros.determinism import embedding_seed, preserved_generator, visit_seed
from poros.engine.activations import BoundaryActivations, DeviceActivations
from poros.engine.block_states import PassStates
from poros.engine.embedding import check_token_ids
from poros.engine.graphs import GraphCache
from poros.engine.kept import KeptVisits, highest
from poros.engine.loss import RunningLoss
from poros.engine.noise import add_embedding_noise
from poros.engine.offload import HostActivations
from poros.engine.packed import packed_positions
from poros.engine.schedule import Loss, Op, Prefetch, Release, Schedule, ScheduleRequest, Visit, make_schedule
from poros.engine.static_states import StaticState, StaticStates
from poros.engine.targets import Targets, count_supervised, make_targets
from poros.engine.template import BlockTemplate
from poros.engine.templates import Templates
from poros.engine.workspace import Workspace
from poros.errors import UserError, explain
from poros.interfaces import MicroBatch
from poros.model import LoadedModel
from poros.settings import Plan

__all__ = ["Engine", "StepOutput"]


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
    input_ids: list[torch.Tensor]
    shapes: list[tuple[int, int]]
    positions: list[torch.Tensor | None]
    targets: list[Targets]
    denominator: int
    lowest_backward: int | None
    losses: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    running: dict[int, RunningLoss] = field(default_factory=dict)

    @property
    def training(self) -> bool:
        """Whether a backward follows."""
        return self.lowest_backward is not None


class Engine:
    """Runs forward, loss and backward of a loaded model under a plan.

    The same visit code serves streamed and resident blocks; only which buffer a template is bound to differs.

    Attributes:
        model: the loaded model: store, kinds, bank, embedding, head.
        plan: placement.
        slots: the device slots, or None where nothing is streamed.
        graphs: captured visits.
        seed: run seed of every dropout mask and of the embedding's noise.
    """

    def __init__(self, model: LoadedModel, plan: Plan, *, seed: int) -> None:
        self.model = model
        self.plan = plan
        self.seed = seed
        self.device = model.device
        streamed = len(model.resident) < model.num_blocks or model.num_streamed_head_chunks > 0
        self._resident = model.resident
        # More slots than blocks would stay empty.
        num_slots = min(plan.num_slots, max(2, len(model.store.layouts)))
        self.slots: Slots | None = make_slots(model.store, num_slots, self.device) if streamed else None
        self._region = StaticRegion(
            [kind.adapter for kind in model.kinds], self.device, model.numerics.compute_dtype
        )
        compute_dtype = model.numerics.compute_dtype
        # Compiled blocks take their matrices as arguments.
        per_visit = plan.workspace or model.numerics.blocks == "compiled"
        workspace = Workspace(model.kinds, compute_dtype, self.device, per_visit=per_visit)
        self._templates = Templates(model, self.slots, self._region, workspace)
        self._states = StaticStates(model)
        self._pass_states = PassStates(model)
        self._kept = KeptVisits(highest(model.resident, plan.kept_blocks))
        self.graphs = GraphCache(self.device, enabled=plan.graphs)
        make_activations = HostActivations if plan.activations == "host" else DeviceActivations
        self._activations: BoundaryActivations = make_activations(
            model.num_blocks, model.hidden_size, self.device, model.numerics.compute_dtype
        )
        self._moved = (0, 0)
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
        lowest = self.model.bank.lowest_adapted()
        state = self._begin(micro_batches, step, lowest_backward=lowest)
        if state.denominator == 0:
            raise UserError(
                explain(
                    f"Optimizer step {step} has nothing to learn from",
                    expected="at least one supervised token",
                    got="0",
                    next_step="Look at the rows with `poros data preview`, or raise `max_length`",
                )
            )
        self._run(state, lowest_backward=lowest)
        return StepOutput(tuple(state.losses), state.denominator)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, int]:
        """Return (summed cross-entropy, supervised tokens) of a forward-only pass. Changes no training state."""
        state = self._begin(micro_batches, step=0, lowest_backward=None)
        self._run(state, lowest_backward=None)
        return float(sum(loss.double() for loss in state.losses)), state.denominator

    def last_hidden(self, micro_batch: int) -> torch.Tensor:
        """Return the last block's (B, T, D) output in the evaluation that just ended; the next pass overwrites it."""
        return self._activations.state(self.model.num_blocks, micro_batch)

    def visit_blocks(
        self, block: Callable[[int, BlockTemplate], None], head: Callable[[int, torch.Tensor], None]
    ) -> None:
        """Bring every block and every streamed head chunk to the device once, in order, for a pass of one's own.

        Args:
            block: called with each block's index and its template, bound, with its adapter loaded and dropout off.
            head: called with the index and the (C, D) rows of each vocabulary chunk of a streamed head.
        """
        on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
        ops = self.schedule(1, None).ops
        self._announce(ops)
        try:
            with on_device:
                for op in ops:
                    if not isinstance(op, Visit):
                        self._move(op)
                        continue
                    self._acquire(op)
                    if op.direction == "head":
                        assert self.slots is not None
                        assert op.slot is not None
                        chunk = op.block - self.model.num_blocks
                        head(chunk, self.model.head_chunk(chunk, self.slots.buffers[op.slot]))
                        continue
                    template = self._templates.get(op.block, op.slot, training=False)
                    template.set_training(False)
                    self.model.bank.load_weights(op.block, self._region)
                    template.materialize()
                    block(op.block, template)
        except BaseException:
            self._drain()
            raise

    def _begin(self, micro_batches: Sequence[MicroBatch], step: int, *, lowest_backward: int | None) -> _Pass:
        for micro_batch in micro_batches:
            check_token_ids(micro_batch, self.model.num_tokens)
        positions = [packed_positions(m, self.model.architecture) for m in micro_batches]
        shapes = [(int(m.input_ids.shape[0]), int(m.input_ids.shape[1])) for m in micro_batches]
        self._activations.begin(
            shapes, together=self.plan.order == "block-major", lowest_backward=lowest_backward
        )
        self._pass_states.begin(shapes, together=self.plan.order == "block-major")
        self._kept.begin_pass()
        for table in self.model.token_tables:
            table.begin(sum(batch * tokens for batch, tokens in shapes))
        return _Pass(
            step=step,
            input_ids=[m.input_ids for m in micro_batches],
            shapes=shapes,
            positions=[None if p is None else p.to(self.device) for p in positions],
            targets=[make_targets(m.labels, self.device) for m in micro_batches],
            denominator=sum(count_supervised(m) for m in micro_batches),
            lowest_backward=lowest_backward,
            losses=[],
            gradients=[None] * len(micro_batches),
        )

    def _run(self, state: _Pass, lowest_backward: int | None) -> None:
        schedule = self.schedule(len(state.shapes), lowest_backward)
        self._announce(schedule.ops)
        self.graphs.begin_pass()
        for template in self._templates:
            template.set_training(state.training)
        # Streams, events and captures belong to the device that is current.
        on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
        try:
            with on_device, self._dropout(state.training):
                for op in schedule.ops:
                    self._execute(op, state)
        except BaseException:
            # An aborted pass leaves copies in flight; the next pass starts from what the slots really hold.
            self._drain()
            raise

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
                num_head_chunks=self.model.num_streamed_head_chunks,
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
        else:
            self._move(op)

    def _announce(self, ops: Sequence[Op]) -> None:
        if self.slots is not None:
            self.slots.announce(op.block for op in ops if isinstance(op, Prefetch))

    def _move(self, op: Op) -> None:
        if isinstance(op, Prefetch):
            assert self.slots is not None
            self.slots.prefetch(op.block, op.slot)
        elif isinstance(op, Release):
            assert self.slots is not None
            self.slots.release(op.slot)

    def _acquire(self, visit: Visit) -> None:
        if visit.slot is not None:
            assert self.slots is not None
            held = self.slots.contents[visit.slot]
            assert held == visit.block, f"slot {visit.slot} holds block {held}"
            self.slots.acquire(visit.slot)

    def _visit(self, visit: Visit, state: _Pass) -> None:
        self._acquire(visit)
        if visit.direction == "head":
            self._head(visit, state)
            return
        template = self._templates.get(visit.block, visit.slot, training=state.training)
        self._activations.enter(visit.block, visit.direction)
        self.model.bank.load_weights(visit.block, self._region)
        if template.has_workspace:
            self._kernels(template, "dequantize", None, template.materialize)()
        if visit.direction == "forward":
            for micro_batch in visit.micro_batches:
                self._forward(template, visit.block, micro_batch, state)
        else:
            self._backward(template, visit, state)
        self._activations.leave(visit.block, visit.direction)
        if __debug__:
            template.assert_bound()

    def _forward(self, template: BlockTemplate, block: int, micro_batch: int, state: _Pass) -> None:
        static = self._states.get(state.shapes[micro_batch], template.kind, state.positions[micro_batch])
        hidden = self._activations.state(block, micro_batch)
        if block == 0:
            self.model.embedding.write(state.input_ids[micro_batch], hidden)
            if state.training and (alpha := self.model.numerics.neftune_alpha):
                add_embedding_noise(hidden, alpha, embedding_seed(self.seed, state.step, micro_batch))
            self._pass_states.enter_model(state.input_ids[micro_batch], hidden, micro_batch)
        static.hidden.copy_(hidden)
        self._pass_states.load(block, micro_batch, static)

        if not self._forward_kept(template, block, micro_batch, static, state):
            direction = "forward" if state.training else "evaluation"  # dropout is off in an evaluation
            run = self._kernels(template, direction, static, self._forward_kernels(template, static))
            self._seed(state.step, micro_batch, block)
            run()
        self._activations.state(block + 1, micro_batch).copy_(static.hidden)
        self._pass_states.keep(micro_batch, static)

    def _forward_kept(
        self, template: BlockTemplate, block: int, micro_batch: int, static: StaticState, state: _Pass
    ) -> bool:
        """Run a forward whose backward will not recompute, if the plan has the block so; return whether it ran."""
        backward = state.lowest_backward is not None and block >= state.lowest_backward
        # The tables of packed rows are written anew for every micro-batch: a tape would read the last one's.
        if not backward or state.positions[micro_batch] is not None or not self._kept.keeps(block):
            return False
        return self._kept.forward(
            template,
            block,
            micro_batch,
            static,
            self._wanted(template),
            lambda: self._seed(state.step, micro_batch, block),
        )

    @staticmethod
    def _forward_kernels(template: BlockTemplate, static: StaticState) -> Callable[[], None]:
        def kernels() -> None:
            output, written = template.forward(static.hidden, static.context, static.states)
            static.hidden.copy_(output)
            for name, value in written.items():
                static.states[name].copy_(value)

        return kernels

    def _backward(self, template: BlockTemplate, visit: Visit, state: _Pass) -> None:
        bank = self.model.bank
        adapted = bank.has_adapter(visit.block)
        if adapted:
            bank.load_gradients(visit.block, self._region)
        for micro_batch in visit.micro_batches:
            static = self._states.get(state.shapes[micro_batch], template.kind, state.positions[micro_batch])
            gradient = state.gradients[micro_batch]
            assert gradient is not None
            static.gradient.copy_(gradient)
            self._pass_states.load_gradients(micro_batch, static)
            recorded = self._kept.pop(visit.block, micro_batch)
            if recorded is None:
                static.hidden.copy_(self._activations.state(visit.block, micro_batch))
                self._pass_states.load(visit.block, micro_batch, static)
                run = self._kernels(template, "backward", static, self._backward_kernels(template, static))
                self._seed(state.step, micro_batch, visit.block)
                run()
            else:
                _store_gradients(
                    static, template.backpropagate(recorded, static.gradient, static.state_gradients)
                )
            gradient.copy_(static.gradient)
            self._pass_states.add_gradients(micro_batch, static)
        if adapted:
            bank.store_gradients(visit.block, self._region)

    def _wanted(self, template: BlockTemplate) -> list[str]:
        """Return the states that the block reads and whose writers have a backward visit."""
        return [s.name for s in template.kind.states.reads if s.name in self._pass_states.with_gradient]

    def _backward_kernels(self, template: BlockTemplate, static: StaticState) -> Callable[[], None]:
        wanted = self._wanted(template)

        def kernels() -> None:
            _store_gradients(
                static,
                template.backward(
                    static.hidden,
                    static.gradient,
                    static.context,
                    static.states,
                    static.state_gradients,
                    wanted,
                ),
            )

        return kernels

    def _kernels(
        self, template: BlockTemplate, name: str, static: StaticState | None, kernels: Callable[[], None]
    ) -> Callable[[], None]:
        """Return the kernels or their graph. Addresses follow from the template and the static state."""
        key = () if static is None else static.key
        family = (id(template.kind), name, key)
        return self.graphs.prepare((id(template), name, key), family, kernels, keep=(template, static))

    def _head(self, visit: Visit, state: _Pass) -> None:
        """Add one streamed vocabulary chunk to the loss of every micro-batch."""
        assert self.slots is not None
        assert visit.slot is not None
        chunk = visit.block - self.model.num_blocks
        weight = self.model.head_chunk(chunk, self.slots.buffers[visit.slot])
        for micro_batch in visit.micro_batches:
            if chunk == 0:
                state.running[micro_batch] = self._running_loss(micro_batch, state)
            state.running[micro_batch].add_chunk(chunk, weight)

    def _loss(self, micro_batch: int, state: _Pass) -> None:
        running = state.running.pop(micro_batch, None)
        if running is None:
            running = self._running_loss(micro_batch, state)
            for index, weight in enumerate(self.model.head.chunks):
                running.add_chunk(index, weight)
        state.losses.append(running.loss())
        if state.training:
            state.gradients[micro_batch] = running.gradient()

    def _running_loss(self, micro_batch: int, state: _Pass) -> RunningLoss:
        return RunningLoss(
            self.model.head,
            self._activations.state(self.model.num_blocks, micro_batch),
            state.targets[micro_batch],
            state.denominator if state.training else 1,
            training=state.training,
        )

    def _seed(self, step: int, micro_batch: int, block: int) -> None:
        if self._generator is not None:
            self._generator.manual_seed(visit_seed(self.seed, step, micro_batch, block))

    # ---- reporting

    def take_statistics(self) -> CopyStatistics:
        """Return and reset what was copied; call where the device is idle."""
        taken = self.slots.take_statistics() if self.slots is not None else CopyStatistics()
        if isinstance(self._activations, HostActivations):
            moved = self._activations.loaded_bytes, self._activations.offloaded_bytes
            taken.h2d_bytes += moved[0] - self._moved[0]
            taken.d2h_bytes += moved[1] - self._moved[1]
            self._moved = moved
        return taken

    def _drain(self) -> None:
        if self.slots is not None:
            self.slots.drain()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Wait for pending copies, stop what reads the disk and release page locks."""
        self._drain()
        if self.slots is not None:
            self.slots.close()
        if isinstance(self._activations, HostActivations):
            self._activations.close()
        for table in self.model.token_tables:
            table.close()
        self.model.store.close()


def _store_gradients(static: StaticState, gradients: tuple[torch.Tensor, Mapping[str, torch.Tensor]]) -> None:
    """Put the gradients of a block's input and of the states that it reads to their fixed addresses."""
    gradient, of_states = gradients
    static.gradient.copy_(gradient)
    for name, value in of_states.items():
        static.state_gradients[name].copy_(value)
