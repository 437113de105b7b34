"""The `MatMul4Bit` aliasing fault, reproduced on a real block, next to the visit that is immune to it.

bitsandbytes keeps the packed weight on ``ctx`` outside ``save_for_backward``. If the forward that autograd remembers
ran before the slot was refilled, backward multiplies by another block's weight: the output was right, the gradients
are silently wrong. The engine's first forward therefore runs under ``no_grad``, and recompute and backward share
one visit.

Shape letters: B batch, T tokens, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import bitsandbytes
import bitsandbytes.functional as bnb
import torch

from poros.adapters import base_linears
from poros.engine.template import BlockTemplate
from poros.interfaces import BlockContext
from poros.parity.case_run import CaseRun
from poros.parity.compare import bitwise_equal

__all__ = ["MAX_FAULTY_COSINE", "AliasingOutcome", "reproduce_aliasing"]

# The fault counts as reproduced below this gradient cosine. Measured 2026-11-30 on an H200 at 7B to 72B block shapes:
# -0.087 to -0.020 (validation/receipts); right gradients have 1.
MAX_FAULTY_COSINE = 0.9


@dataclass(frozen=True, slots=True)
class AliasingOutcome:
    """What a tape that outlives its slot did, and what the engine's visit did.

    Attributes:
        block_bytes: size of the block in the slot.
        output_equal: the faulty run's output (hence its loss) equals the right one.
        faulty_gradient_cosine: smallest cosine of its gradients with the right ones; 1 would mean no fault.
        visit_equal: gradients of recompute and backward inside one visit, after the same refill, are bitwise right.
    """

    block_bytes: int
    output_equal: bool
    faulty_gradient_cosine: float
    visit_equal: bool


def reproduce_aliasing(run: CaseRun, tokens: int) -> AliasingOutcome:
    """Run blocks 0 and 1 of an NF4 ``run`` through one slot, with and without the fault.

    Args:
        run: a case whose blocks 0 and 1 are of one kind, all of whose linears are NF4.
        tokens: T of the random hidden states.
    """
    model, device = run.model, run.model.device
    kind = next(kind for kind in model.kinds if {0, 1} <= set(kind.blocks))
    slot = torch.zeros(kind.layout.num_bytes, dtype=torch.uint8, device=device)
    model.bank.load_weights(0, run.engine._region)
    template = BlockTemplate(
        kind,
        slot,
        run.engine._region,
        model.architecture,
        model.numerics.compute_dtype,
        workspace=None,
        shared=(model.config,),
    )
    context = model.make_context(1, tokens)
    generator = torch.Generator(device=device).manual_seed(1)
    shape = (1, tokens, model.hidden_size)
    hidden = torch.randn(shape, generator=generator, device=device).to(model.numerics.compute_dtype)
    grad = torch.randn(shape, generator=generator, device=device).to(model.numerics.compute_dtype)

    def refill(block: int) -> None:
        # Through .data, as a copy engine does it: version counters do not see it.
        slot.data.copy_(model.store.block(block))

    refill(0)
    right = _record(template, hidden, context)
    right_gradients = torch.autograd.grad(right[1], right[0], grad)

    _use_bitsandbytes(template)
    try:
        own = _record(template, hidden, context)
        own_gradients = torch.autograd.grad(own[1], own[0], grad)
        stale = _record(template, hidden, context)
        refill(1)
        stale_gradients = torch.autograd.grad(stale[1], stale[0], grad)
    finally:
        _use_product_path(template)

    template.forward(hidden, context, {})
    refill(0)
    again = _record(template, hidden, context)
    again_gradients = torch.autograd.grad(again[1], again[0], grad)
    return AliasingOutcome(
        block_bytes=kind.layout.num_bytes,
        output_equal=bitwise_equal(stale[1].detach(), own[1].detach()),
        faulty_gradient_cosine=min(map(_cosine, own_gradients, stale_gradients)),
        visit_equal=all(map(bitwise_equal, right_gradients, again_gradients)),
    )


def _record(
    template: BlockTemplate, hidden: torch.Tensor, context: BlockContext
) -> tuple[list[torch.Tensor], torch.Tensor]:
    leaf = hidden.detach().requires_grad_()
    with torch.enable_grad():
        return [leaf, *template.adapter_parameters()], template.call(leaf, context, {})[0]


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0))


def _use_bitsandbytes(template: BlockTemplate) -> None:
    """Give every linear the forward of `bitsandbytes.nn.Linear4bit`: its autograd function over the slot's bytes."""
    for _, linear in base_linears(template.module):
        codes, absmax, code, offset, nested_absmax, nested_code = linear.stored_tensors()
        state = bnb.QuantState(
            absmax=absmax,
            shape=torch.Size((linear.out_features, linear.in_features)),
            dtype=linear.compute_dtype,
            blocksize=64,
            code=code,
            quant_type="nf4",
            offset=offset,
            state2=bnb.QuantState(absmax=nested_absmax, code=nested_code, blocksize=256, dtype=torch.float32),
        )

        def forward(x: torch.Tensor, linear=linear, codes=codes, state=state):  # type: ignore[no-untyped-def]
            bias = linear.bias_in_compute_dtype()
            # matmul_4bit picks its own fused kernel by row count; the autograd function is what trainers run.
            return bitsandbytes.autograd._functions.MatMul4Bit.apply(
                x.to(linear.compute_dtype), codes, None, bias, state
            )

        linear.forward = forward  # type: ignore[method-assign]


def _use_product_path(template: BlockTemplate) -> None:
    for _, linear in base_linears(template.module):
        del linear.forward
