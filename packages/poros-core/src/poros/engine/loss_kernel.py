"""The pass over one chunk of logits as one kernel: what `poros.engine.loss` does in nine passes over float32 copies.

One program per position reads its row twice and writes it once, in the compute dtype. Nothing depends on how many
positions there are, so that a short last chunk gives the bits that a full one would. It belongs to compiled blocks: the
sums run in another order than the ones of eager runs, and both need Triton.

Triton takes no types that it does not know, so the kernel's arguments have none.

Shape letters: P positions, C entries of the chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["fused_terms"]

COLUMNS_AT_ONCE = 4096
WARPS = 8


@triton.jit
def _capped(x, softcap):  # type: ignore[no-untyped-def]
    """tanh(x / softcap), without overflow on either side."""
    small = tl.exp(-2 * tl.abs(x / softcap))
    value = (1 - small) / (1 + small)
    return tl.where(x < 0, -value, value)


@triton.jit
def _terms_kernel(  # type: ignore[no-untyped-def]
    logits,
    own,
    maximum,
    others,
    target_logits,
    decay,
    softcap,
    COLUMNS: tl.constexpr,
    CAPPED: tl.constexpr,
    TRAINING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    first = logits + row.to(tl.int64) * COLUMNS
    columns = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        inside = start + columns < COLUMNS
        x = tl.load(first + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(highest, x)
    target = tl.load(own + row)
    found = tl.load(first + tl.maximum(target, 0)).to(tl.float32)
    largest = tl.max(highest)
    if CAPPED:
        largest = _capped(largest, softcap) * softcap
        found = _capped(found, softcap) * softcap
    tl.store(target_logits + row, found, mask=target >= 0)
    before = tl.load(maximum + row)
    largest = tl.maximum(largest, before)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        inside = start + columns < COLUMNS
        x = tl.load(first + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        slope = tl.full([BLOCK], 1.0, tl.float32)
        if CAPPED:
            capped = _capped(x, softcap)
            slope = 1 - capped * capped
            x = capped * softcap
        term = tl.where(inside & (start + columns != target), tl.exp(x - largest), 0.0)
        total += term
        if TRAINING:
            weight = (term * slope).to(logits.dtype.element_ty)
            tl.store(first + start + columns, weight, mask=inside)
    scale = tl.exp(before - largest)
    tl.store(decay + row, scale)
    tl.store(others + row, tl.load(others + row) * scale + tl.sum(total))
    tl.store(maximum + row, largest)


def fused_terms(
    logits: torch.Tensor,
    own: torch.Tensor,
    maximum: torch.Tensor,
    others: torch.Tensor,
    target_logits: torch.Tensor,
    *,
    softcap: float | None,
    training: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `poros.engine.loss.eager_terms` does; see there. ``logits`` are overwritten while training."""
    positions, columns = logits.shape
    decay = torch.empty_like(maximum)
    with torch.cuda.device_of(logits):
        _terms_kernel[(positions,)](
            logits,
            own,
            maximum,
            others,
            target_logits,
            decay,
            1.0 if softcap is None else softcap,
            COLUMNS=columns,
            CAPPED=softcap is not None,
            TRAINING=training,
            BLOCK=COLUMNS_AT_ONCE,
            num_warps=WARPS,
            enable_fp_fusion=False,  # every operation rounds as it is written, whatever Triton's default
        )
    return logits, decay
