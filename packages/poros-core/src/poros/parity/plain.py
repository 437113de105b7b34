"""The plain oracle: ordinary autograd over the same modules, no visits, no recompute, everything resident.

States that blocks share stay on the tape: autograd itself sums their readers' gradients, last block first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.function import FunctionCtx

from poros.bank import StaticRegion
from poros.determinism import embedding_seed, preserved_generator, visit_seed
from poros.engine.loss import LossHead
from poros.engine.noise import add_embedding_noise
from poros.engine.packed import PackedContext, packed_positions
from poros.engine.targets import Targets, count_supervised, make_targets
from poros.engine.template import BlockTemplate
from poros.interfaces import MicroBatch
from poros.parity.case_run import RUN_SEED, CaseRun

__all__ = ["train_plain"]


def train_plain(run: CaseRun, num_steps: int) -> None:
    """Train a resident `CaseRun` by building the whole graph of every micro-batch and calling ``backward``.

    The run's engine is not used. Gradients accumulate in ``.grad`` of ordinary parameters.
    """
    blocks = [_PlainBlock(run, index) for index in range(run.model.num_blocks)]
    for template in (block.template for block in blocks):
        template.set_training(True)
    for _ in range(num_steps):
        for block in blocks:
            block.begin_step()
        losses = _forward_backward(run, blocks, run.micro_batches(run.next_step), run.next_step)
        run.model.bank.zero_gradients()
        for block in blocks:
            block.end_step()
        run.update(losses)


class _PlainBlock:
    """One block bound to its own bytes and its own adapter memory."""

    def __init__(self, run: CaseRun, index: int) -> None:
        self._bank = run.model.bank
        self._index = index
        kind = next(kind for kind in run.model.kinds if index in kind.blocks)
        self._region = StaticRegion([kind.adapter], run.model.device)
        self.template = BlockTemplate(
            kind,
            run.model.store.block(index),
            self._region,
            run.model.architecture,
            run.model.numerics.compute_dtype,
            workspace=None,
            shared=(run.model.config,),
        )
        self._tensors = list(kind.adapter.tensors)

    def begin_step(self) -> None:
        self._bank.load_weights(self._index, self._region)
        for parameter in self.template.adapter_parameters():
            parameter.grad = torch.zeros_like(parameter)

    def end_step(self) -> None:
        for tensor, parameter in zip(self._tensors, self.template.adapter_parameters(), strict=True):
            assert parameter.grad is not None
            self._region.gradient(tensor).copy_(parameter.grad)
        self._bank.store_gradients(self._index, self._region)


def _forward_backward(
    run: CaseRun, blocks: list[_PlainBlock], micro_batches: Sequence[MicroBatch], step: int
) -> torch.Tensor:
    model = run.model
    denominator = sum(count_supervised(m) for m in micro_batches)
    losses = []
    with preserved_generator(model.device) as generator:
        for j, micro_batch in enumerate(micro_batches):
            shape = micro_batch.input_ids.shape
            context = model.make_context(int(shape[0]), int(shape[1]))
            positions = packed_positions(micro_batch, model.architecture)
            if positions is not None:
                context = PackedContext(context, int(shape[0])).load(positions.to(model.device))
            hidden = model.embedding.rows(micro_batch.input_ids)
            if alpha := model.numerics.neftune_alpha:
                add_embedding_noise(hidden, alpha, embedding_seed(RUN_SEED, step, j))
            table = model.per_block
            inputs = None if table is None else table.inputs(micro_batch.input_ids, hidden)
            states: dict[str, torch.Tensor] = {}
            for index, block in enumerate(blocks):
                generator.manual_seed(visit_seed(RUN_SEED, step, j, index))
                if table is not None and inputs is not None:
                    states[table.declared.spec.name] = inputs[:, :, index]
                hidden, written = block.template.call(hidden, context, states)
                states.update(written)
            targets = make_targets(micro_batch.labels, model.device)
            loss = _HeadLoss.apply(hidden, model.head, targets, denominator)
            loss.backward()
            losses.append(loss.detach())
    return torch.stack(losses)


class _HeadLoss(torch.autograd.Function):
    """The head's loss as a node of the graph. Its gradient is checked against the formula by tests of its own."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: torch.Tensor, head: LossHead, targets: Targets, denominator: int
    ) -> torch.Tensor:
        with torch.enable_grad():
            loss, gradient = head.loss_and_gradient(hidden.detach(), targets, denominator)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient * grads[0], None, None, None
