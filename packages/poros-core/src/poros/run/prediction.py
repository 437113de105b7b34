"""Predicted bytes of a run, term by term, from the meta model alone.

Shape letters: B batch, T tokens, D hidden size, V vocabulary, L blocks, O and I of a linear layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.attention import SDPBackend

from poros.adapters import base_linears
from poros.bank import GROUPS
from poros.blocks.kinds import BlockKind
from poros.model import MetaModel
from poros.precision import attention_backend
from poros.settings import Numerics, Plan

__all__ = ["Prediction", "StepShape", "predict"]

FLOAT32_BYTES = 4
# One chunk of logits in float32 (4), its log-softmax (4), the gradient in float32 (4) and the compute dtype (2).
LOSS_BYTES_PER_LOGIT = 14
# Weights, gradients and two moments of every adapter element.
ADAPTER_COPIES = 2 + 2
# What autograd keeps of a block's recompute besides inputs and outputs of its linear layers (norms, rotary tables,
# products of the MLP), in hidden-size vectors per token; counted from a Qwen2 block's graph.
EXTRA_VECTORS_PER_TOKEN = 8


# Rotary tables, masks, targets and the allocator's rounding. With it, predictions lie between 0.99 and 1.02 of what the
# receipts in validation/receipts measured (one H200, torch 2.11, 2026-11-30).
SMALL_BYTES = 32 * 2**20
# Scores, their softmax and its gradient in the math attention backend.
SCORE_COPIES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """The micro-batches of the largest step: how many, and B and T of each."""

    num_micro_batches: int
    micro_batch_size: int
    tokens: int

    @property
    def positions(self) -> int:
        """Positions of one micro-batch, padding included."""
        return self.micro_batch_size * self.tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Predicted bytes by term.

    Attributes:
        device: terms of the peak in device memory; on the CPU they are host memory too.
        host: terms in host memory.
        block_bytes: per kind, the bytes of one block, in the kinds' order.
        store_bytes: bytes of all blocks.
    """

    device: Mapping[str, int]
    host: Mapping[str, int]
    block_bytes: tuple[int, ...]
    store_bytes: int

    @property
    def device_bytes(self) -> int:
        """The predicted peak of device memory."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """The predicted peak of host memory, without the process itself."""
        return sum(self.host.values())


def predict(
    meta: MetaModel, *, numerics: Numerics, plan: Plan, shape: StepShape, device_type: str = "cuda"
) -> Prediction:
    """Predict where a run's bytes go. It is a prediction: the run reports what it measured.

    Args:
        meta: the model without weights.
        numerics, plan: settings of the run.
        shape: its largest optimizer step.
        device_type: decides the attention backend, and with it whether scores are kept.
    """
    compute, storage = numerics.compute_dtype.itemsize, numerics.storage_dtype.itemsize
    hidden, vocabulary = int(meta.config.hidden_size), int(meta.config.vocab_size)
    num_blocks = len(meta.blocks)
    block_bytes = tuple(kind.layout.num_bytes for kind in meta.kinds)
    store_bytes = sum(kind.layout.num_bytes * len(kind.blocks) for kind in meta.kinds)
    table_bytes = vocabulary * hidden * storage
    streamed = plan.residency == "streamed"
    together = shape.num_micro_batches if plan.order == "block-major" else 1
    adapter = sum(_adapter_elements(kind) * len(kind.blocks) for kind in meta.kinds) * FLOAT32_BYTES
    region = max(_adapter_elements(kind) for kind in meta.kinds) * FLOAT32_BYTES
    boundary = (num_blocks + 1) * shape.positions * hidden * compute * together
    # Embedded rows and the gradient that travels down are kept per micro-batch.
    carried = 2 * shape.positions * hidden * compute * shape.num_micro_batches
    device = {
        "slots" if streamed else "resident blocks": plan.num_slots * max(block_bytes)
        if streamed
        else store_bytes,
        "head": table_bytes,
        "adapters, gradients, moments": ADAPTER_COPIES * adapter + 2 * region,
        "boundary activations": boundary + carried,
    }
    dequantized = _dequantized_bytes(meta, numerics, plan)
    working = max(_working_bytes(kind.prototype, shape, hidden, compute) for kind in meta.kinds)
    working += _score_bytes(meta, numerics, shape, device_type)
    if plan.workspace:
        device["workspace"] = dequantized
    else:
        working += dequantized
    # These two are never alive together; the larger one makes the peak.
    transient = {
        "loss chunk": _loss_bytes(numerics, shape, vocabulary, hidden, compute),
        "block working set": working,
    }
    largest = max(transient, key=lambda name: transient[name])
    device[largest] = transient[largest]
    device["masks, tables, allocator"] = SMALL_BYTES
    if not streamed and not meta.parts.tied:
        device["embedding"] = table_bytes
    host = {"block store": store_bytes, "embedding": table_bytes} if streamed else {}
    host["one block while loading"] = _largest_linear(meta) * FLOAT32_BYTES
    return Prediction(device=device, host=host, block_bytes=block_bytes, store_bytes=store_bytes)


def _adapter_elements(kind: BlockKind) -> int:
    return sum(kind.adapter.row_size(group) for group in GROUPS)


def _loss_bytes(numerics: Numerics, shape: StepShape, vocabulary: int, hidden: int, compute: int) -> int:
    chunk = min(numerics.loss_chunk_positions, shape.positions)
    return chunk * vocabulary * LOSS_BYTES_PER_LOGIT + shape.positions * hidden * compute


def _dequantized_bytes(meta: MetaModel, numerics: Numerics, plan: Plan) -> int:
    """With a workspace every matrix of every kind; otherwise the one matrix in use."""
    itemsize = numerics.compute_dtype.itemsize
    sizes = [
        [
            linear.in_features * linear.out_features * itemsize
            for _, linear in base_linears(kind.prototype)
            if linear.needs_dequantize
        ]
        for kind in meta.kinds
    ]
    if plan.workspace:
        return sum(sum(of_kind) for of_kind in sizes)
    return max((max(of_kind, default=0) for of_kind in sizes), default=0)


def _working_bytes(block: nn.Module, shape: StepShape, hidden: int, compute: int) -> int:
    """What one recompute and its backward hold: inputs and outputs of every linear layer, and what lies between."""
    widths = sum(linear.in_features + linear.out_features for _, linear in base_linears(block))
    return (widths + EXTRA_VECTORS_PER_TOKEN * hidden) * shape.positions * compute


def _score_bytes(meta: MetaModel, numerics: Numerics, shape: StepShape, device_type: str) -> int:
    """The math backend keeps a (B, N, T, T) matrix; flash attention keeps none."""
    backend = attention_backend(torch.device(device_type), numerics.compute_dtype, masked=False)
    if backend != SDPBackend.MATH:
        return 0
    scores = shape.micro_batch_size * int(meta.config.num_attention_heads) * shape.tokens**2
    return SCORE_COPIES * scores * FLOAT32_BYTES


def _largest_linear(meta: MetaModel) -> int:
    return max(
        linear.in_features * linear.out_features
        for kind in meta.kinds
        for _, linear in base_linears(kind.prototype)
    )
