"""Seconds of compute that a visit, the loss and the optimizer take, from module shapes and rates.

Shape letters: B batch, T tokens, D hidden size, V vocabulary, N query heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend

from poros.planning.facts import KindFacts, ModelFacts
from poros.planning.linear_attention import BACKWARD_PASSES, FORWARD_PASSES
from poros.planning.rates import Rates
from poros.planning.shape import StepShape
from poros.precision import attention_backend
from poros.settings import Numerics, Plan

__all__ = ["VisitCost", "loss_seconds", "optimizer_seconds", "visit_cost"]

FLOPS_PER_WEIGHT = 2
# An adapter's product once in forward; differentiated on both sides. Of a frozen weight only the input's side is made.
ADAPTER_GRADIENT_PRODUCTS = 2
# How often all that lies between a block's products (inputs and outputs of its linear layers, 8 hidden-size vectors a
# token) crosses device memory in forward + recompute + backward; PEFT's casts included. Solved from the floors that
# `poros.planning.rates` names, for both executions of blocks.
MEMORY_PASSES = {"eager": 21.0, "compiled": 8.3}
FORWARD_SHARE = 0.3
EXTRA_VECTORS_PER_TOKEN = 8
# Kernels of a visit of one micro-batch per linear layer, norms and attention spread over them: about 700 a block of
# seven adapted linear layers.
FORWARD_KERNELS_PER_LINEAR = 22
BACKWARD_KERNELS_PER_LINEAR = 78
COMPILED_KERNELS = 0.65
# Flash attention: two causal products forward; recomputed, and five backward; at about half the rate of large products.
ATTENTION_FORWARD, ATTENTION_BACKWARD = 1.0, 3.5
ATTENTION_SLOWDOWN = 2.0
# The math backend writes and reads scores, softmax and both gradients.
SCORE_PASSES_FORWARD, SCORE_PASSES_BACKWARD = 6, 16
# Logits once, and the gradient of the hidden states.
HEAD_PRODUCTS = 2
LOGIT_BYTES = 48
# Fused: read for the maximum, read again, and written.
FUSED_LOGIT_PASSES = 3
# Per adapter element: AdamW reads four and writes three float32 values, the norm reads one, clipping reads and writes
# one, zeroing writes one.
OPTIMIZER_BYTES = 44


@dataclass(frozen=True, slots=True)
class VisitCost:
    """Compute seconds of one block's visits, all micro-batches of the visit together.

    Attributes:
        forward_seconds: of a forward visit.
        backward_seconds: of recompute and backward.
        kept_forward_seconds, kept_backward_seconds: of both where the forward is kept: no recompute, and every kernel
            is launched by itself.
    """

    forward_seconds: float
    backward_seconds: float
    kept_forward_seconds: float
    kept_backward_seconds: float


def visit_cost(
    kind: KindFacts,
    facts: ModelFacts,
    *,
    rates: Rates,
    numerics: Numerics,
    plan: Plan,
    shape: StepShape,
    device_type: str,
) -> VisitCost:
    """Return what a forward and a backward visit of a block take.

    Args:
        kind: of the block.
        facts: of the model.
        rates: of the machine.
        numerics, plan, shape: settings of the run.
        device_type: ``cuda`` or ``cpu``.
    """
    together = shape.num_micro_batches if plan.order == "block-major" else 1
    seconds_per_weight = FLOPS_PER_WEIGHT * shape.mean_positions / rates.matmul_flops_per_second
    frozen = kind.weights * seconds_per_weight
    unread = kind.unread_weights * seconds_per_weight
    adapter = kind.adapter_weights * seconds_per_weight
    between = (
        (kind.widths + EXTRA_VECTORS_PER_TOKEN * facts.hidden) * shape.mean_positions * facts.compute_bytes
    )
    memory = between * MEMORY_PASSES[numerics.blocks] / rates.memory_bytes_per_second
    forward_attention, backward_attention = _attention(kind, facts, rates, numerics, shape, device_type)
    forward = frozen + adapter + FORWARD_SHARE * memory + forward_attention
    gradient = (
        frozen
        + ADAPTER_GRADIENT_PRODUCTS * adapter
        + (1 - 2 * FORWARD_SHARE) * memory
        + backward_attention
        - forward_attention
    )
    backward = forward - unread + gradient
    captured = plan.graphs and device_type == "cuda"
    few = COMPILED_KERNELS if numerics.blocks == "compiled" else 1.0
    rule = kind.linear_attention
    more = (0, 0) if rule is None else rule.kernels(shape.tokens)
    # Without recompute a backward does what is left of it without a forward.
    kernels = [
        (kind.num_linears * per_linear + of_rule) * few
        for per_linear, of_rule in (
            (FORWARD_KERNELS_PER_LINEAR, more[0]),
            (BACKWARD_KERNELS_PER_LINEAR, more[1]),
        )
    ]
    seconds = [
        _visit_seconds(busy, count, rates, captured=captured and not kept)
        for busy, count, kept in (
            (forward, kernels[0], False),
            (backward, kernels[1], False),
            (forward, kernels[0], True),
            (gradient, kernels[1] - kernels[0], True),
        )
    ]
    once = kind.dequantized_weights
    uses = (
        once,
        2 * once - kind.unread_dequantized,
        once,
        once,
    )  # of the elements, by the products of a micro-batch
    elements = [once if plan.workspace else together * used for used in uses]
    return VisitCost(
        *(
            together * spent + count / rates.dequantized_weights_per_second
            for spent, count in zip(seconds, elements, strict=True)
        )
    )


def _visit_seconds(busy: float, kernels: float, rates: Rates, *, captured: bool) -> float:
    on_device = busy + kernels * rates.kernel_seconds
    # Launches run ahead of the device; whichever is slower is waited for.
    return on_device if captured else max(on_device, kernels * rates.launch_seconds)


def loss_seconds(facts: ModelFacts, rates: Rates, positions: float, *, fused: bool) -> float:
    """Return the seconds of head and loss over ``positions``, as if every one were supervised.

    Args:
        facts: of the model.
        rates: of the machine.
        positions: of all micro-batches together.
        fused: see `poros.engine.loss.is_fused`.
    """
    logits = positions * facts.vocabulary
    products = HEAD_PRODUCTS * FLOPS_PER_WEIGHT * logits * facts.hidden / rates.matmul_flops_per_second
    bytes_per_logit = FUSED_LOGIT_PASSES * facts.compute_bytes if fused else LOGIT_BYTES
    return products + logits * bytes_per_logit / rates.memory_bytes_per_second


def optimizer_seconds(facts: ModelFacts, rates: Rates) -> float:
    """Return the seconds of clipping and the update over the bank."""
    return facts.adapter_elements * OPTIMIZER_BYTES / rates.memory_bytes_per_second


def _attention(
    kind: KindFacts,
    facts: ModelFacts,
    rates: Rates,
    numerics: Numerics,
    shape: StepShape,
    device_type: str,
) -> tuple[float, float]:
    if (rule := kind.linear_attention) is not None:
        moved = rule.bytes_per_position * shape.micro_batch_size * rule.padded(shape.tokens)
        once = moved / rates.memory_bytes_per_second
        return FORWARD_PASSES * once, BACKWARD_PASSES * once
    square = shape.micro_batch_size * shape.tokens**2
    flops = 2 * square * facts.num_heads * kind.head_dim  # two products, half of them masked
    unit = flops * ATTENTION_SLOWDOWN / rates.matmul_flops_per_second
    forward, backward = ATTENTION_FORWARD * unit, ATTENTION_BACKWARD * unit
    masked = shape.packed or kind.masked(shape.tokens)
    backend = attention_backend(
        torch.device(device_type), numerics.compute_dtype, masked=masked, head_dim=kind.head_dim
    )
    if backend == SDPBackend.MATH:
        scores = square * facts.num_heads * 4 / rates.memory_bytes_per_second
        forward += SCORE_PASSES_FORWARD * scores
        backward += SCORE_PASSES_BACKWARD * scores
    return forward, backward
