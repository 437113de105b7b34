"""Faults that the gates must catch: each is the real engine with one thing broken.

A gate that has never failed proves nothing. Every control here reproduces a bug that users of other trainers hit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch

from poros.blocks.slots import CudaSlots, HostSlots, Slots
from poros.engine.engine import Engine
from poros.engine.schedule import Visit
from poros.engine.template import BlockTemplate
from poros.model import LoadedModel
from poros.parity.case_run import RUN_SEED
from poros.settings import Plan

__all__ = [
    "FAULTS",
    "GRAPH_FAULTS",
    "STATE_FAULTS",
    "EngineMaker",
    "delayed_copies",
    "poison_before_refill",
    "with_slots",
]


class EngineMaker(Protocol):
    """Builds the engine of a run: the real one, or one with something broken."""

    def __call__(self, model: LoadedModel, plan: Plan, *, seed: int = RUN_SEED) -> Engine:
        """Return the engine of a loaded model."""


# All bits set is a NaN in bfloat16 and float32 alike.
POISON_BYTE = 0xFF

# A copy that is waited for may come late: about 5 ms at 2 GHz.
DELAY_CYCLES = 10_000_000

# A copy that nobody waits for must still be running when its block is read, however slowly the host launches kernels
# (about 7 ms a micro-batch and visit was seen): about 150 ms at 2 GHz.
UNWAITED_DELAY_CYCLES = 300_000_000


class ReversedSums(Engine):
    """Adds the micro-batches' gradients in descending order: another order of sums rounds differently.

    Shows in float32 compute only: a few bfloat16 gradients add up exactly in float32.
    """

    def _backward(self, template: BlockTemplate, visit: Visit, state: Any) -> None:
        order = tuple(reversed(visit.micro_batches))
        super()._backward(template, Visit(visit.block, visit.slot, visit.direction, order), state)


class EarlyRefill(Engine):
    """Refills a slot between the recompute and its backward: the loss is right, the gradients are not.

    With a workspace the backward reads matrices that were dequantized before the recompute; there the refill comes
    before that, as if the copy had not waited for the visit at all.
    """

    def _backward(self, template: BlockTemplate, visit: Visit, state: Any) -> None:
        real_call = template.call
        intruder = (visit.block + 1) % self.model.num_blocks

        def call_then_refill(*args: Any, **options: Any) -> Any:
            output = real_call(*args, **options)
            self._fill(visit, intruder)
            return output

        if template.has_workspace:
            self._fill(visit, intruder)
            template.materialize()
        else:
            template.call = call_then_refill  # type: ignore[method-assign]
        try:
            super()._backward(template, visit, state)
        finally:
            template.call = real_call  # type: ignore[method-assign]
            # The slot would otherwise stay wrong for the visits after this one: the fault is the backward alone.
            self._fill(visit, visit.block)

    def _fill(self, visit: Visit, block: int) -> None:
        assert self.slots is not None
        assert visit.slot is not None
        source = self.model.store.block(block)
        # Through .data: autograd's version counters would catch a copy by torch itself, not one by the device.
        self.slots.buffers[visit.slot].data[: source.numel()].copy_(source)


class SkippedAccumulation(Engine):
    """Forgets the last micro-batch's adapter gradients in one block."""

    def _backward(self, template: BlockTemplate, visit: Visit, state: Any) -> None:
        lowest = self.model.bank.lowest_adapted()
        if visit.block != lowest:
            super()._backward(template, visit, state)
            return
        real_backward = template.backward
        calls = iter(visit.micro_batches)

        def backward(*args: Any) -> Any:
            before = [g.clone() for g in self._region.gradients.values()]
            result = real_backward(*args)
            if next(calls) == len(state.shapes) - 1:
                for gradient, old in zip(self._region.gradients.values(), before, strict=True):
                    gradient.copy_(old)
            return result

        template.backward = backward  # type: ignore[assignment,method-assign]
        try:
            super()._backward(template, visit, state)
        finally:
            template.backward = real_backward  # type: ignore[method-assign]


class LostStateGradients(Engine):
    """Forgets what the readers of a shared state send back: the loss is right, the writer's gradients are not."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        add_gradients = self._pass_states.add_gradients

        def forget(micro_batch: int, static: Any) -> None:
            for gradient in static.state_gradients.values():
                gradient.zero_()
            add_gradients(micro_batch, static)

        self._pass_states.add_gradients = forget  # type: ignore[method-assign]


class UnwaitedHostSlots(HostSlots):
    """Copies run as late as they may, and one acquire in three, the first one too, does not wait for its copy."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, lazy=True)
        self._acquires = 0

    def acquire(self, slot: int) -> None:
        if self._acquires % 3:
            super().acquire(slot)
        self._acquires += 1


class UnwaitedCudaSlots(CudaSlots):
    """Copies are delayed on the copy stream, and the compute stream does not wait for them."""

    def _copy(self, block: int, source: torch.Tensor, slot: int) -> None:
        with torch.cuda.stream(self.copy_stream):
            torch.cuda._sleep(UNWAITED_DELAY_CYCLES)
        super()._copy(block, source, slot)

    def acquire(self, slot: int) -> None:
        pass


class DelayedCudaSlots(CudaSlots):
    """Every copy is delayed on the copy stream, and correctly waited for."""

    def _copy(self, block: int, source: torch.Tensor, slot: int) -> None:
        with torch.cuda.stream(self.copy_stream):
            torch.cuda._sleep(DELAY_CYCLES)
        super()._copy(block, source, slot)


class GraphOfAnotherSlot(Engine):
    """Replays the graph that was captured for the first template of a kind, whatever buffer holds the block."""

    def _kernels(self, template: BlockTemplate, name: str, static: Any, kernels: Any) -> Any:
        first = next(t for t in self._templates if t.kind is template.kind)
        return super()._kernels(first, name, static, kernels)


def _poison_on_release(slots: Slots) -> None:
    """Overwrite a slot with NaN when it is released, although its block is kept for a later visit."""
    release = slots.release

    def poisoning_release(slot: int) -> None:
        slots.buffers[slot].fill_(POISON_BYTE)
        release(slot)

    slots.release = poisoning_release  # type: ignore[method-assign]


def with_slots(make_host: type[HostSlots], make_cuda: type[CudaSlots], **options: Any) -> EngineMaker:
    """Return a maker of the real engine over other slots; ``options`` are those of ``make_host``."""

    def make(model: LoadedModel, plan: Plan, *, seed: int = RUN_SEED) -> Engine:
        engine = Engine(model, plan, seed=seed)
        assert engine.slots is not None, "nothing is streamed"
        num_slots = len(engine.slots.buffers)
        engine.slots.close()
        # The memory of the real ones comes back before the others take theirs.
        engine.slots = engine._templates._slots = None
        if model.device.type == "cuda":
            engine.slots = make_cuda(model.store, num_slots, model.device)
        else:
            engine.slots = make_host(model.store, num_slots, model.device, **options)
        engine._templates._slots = engine.slots
        return engine

    return make


def _engine(kind: type[Engine]) -> EngineMaker:
    # These act from Python inside a visit, which a replayed graph would not run.
    def make(model: LoadedModel, plan: Plan, *, seed: int = RUN_SEED) -> Engine:
        return kind(model, replace(plan, graphs=False), seed=seed)

    return make


def _poisoned(model: LoadedModel, plan: Plan, *, seed: int = RUN_SEED) -> Engine:
    engine = Engine(model, plan, seed=seed)
    assert engine.slots is not None
    _poison_on_release(engine.slots)
    return engine


def poison_before_refill(model: LoadedModel, plan: Plan, *, seed: int = RUN_SEED) -> Engine:
    """Return a correct engine whose slots are filled with NaN right before every copy; it must stay equal."""
    engine = Engine(model, plan, seed=seed)
    slots = engine.slots
    assert slots is not None
    copy = slots._copy

    def poisoning_copy(block: int, source: torch.Tensor, slot: int) -> None:
        if isinstance(slots, CudaSlots):
            with torch.cuda.stream(slots.copy_stream):
                if (released := slots._released[slot]) is not None:
                    slots.copy_stream.wait_event(released)
                slots.buffers[slot].fill_(POISON_BYTE)
        else:
            slots.buffers[slot].fill_(POISON_BYTE)
        copy(block, source, slot)

    slots._copy = poisoning_copy  # type: ignore[method-assign]
    return engine


# Correct engines under the least favourable timing: copies as late as they may be. Must stay equal.
delayed_copies: EngineMaker = with_slots(HostSlots, DelayedCudaSlots, lazy=True)


def _graph_of_another_slot(model: LoadedModel, plan: Plan, *, seed: int = RUN_SEED) -> Engine:
    return GraphOfAnotherSlot(model, plan, seed=seed)


# Faults that need captured graphs, and so a GPU.
GRAPH_FAULTS: dict[str, EngineMaker] = {"graph-of-another-slot": _graph_of_another_slot}

# Faults of blocks that share states; other families have nothing to lose there.
STATE_FAULTS: dict[str, EngineMaker] = {"lost-state-gradients": _engine(LostStateGradients)}

FAULTS: dict[str, EngineMaker] = {
    "reversed-sums": _engine(ReversedSums),
    "early-refill": _engine(EarlyRefill),
    "copy-not-waited-for": with_slots(UnwaitedHostSlots, UnwaitedCudaSlots),
    "poisoned-released-slot": _poisoned,
    "skipped-accumulation": _engine(SkippedAccumulation),
}
