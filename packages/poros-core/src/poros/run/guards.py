"""Checks of every step before the optimizer may use it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from poros.bank import AdapterBank
from poros.errors import NonFiniteError, PorosError, explain
from poros.interfaces import MicroBatch

__all__ = ["check_first_gradients", "check_step_finite"]


def check_step_finite(
    losses: Sequence[float],
    grad_norm: float,
    *,
    micro_batches: Sequence[MicroBatch],
    step: int,
    checkpoint: Path | None,
) -> None:
    """Refuse a step whose loss or gradient norm is NaN or infinite.

    Args:
        losses: per micro-batch.
        grad_norm: of the whole bank, before clipping.
        micro_batches: of this step; their ``row_ids`` are named where they have any.
        step: 1-based number of the step.
        checkpoint: newest checkpoint, to be named.

    Raises:
        NonFiniteError: the adapter is untouched by this step.
    """
    bad = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
    if not bad and math.isfinite(grad_norm):
        return
    suspects = [micro_batches[index] for index in bad] or list(micro_batches)
    rows = [row for batch in suspects for row in getattr(batch, "row_ids", ())]
    got = f"loss {sum(losses)} and gradient norm {grad_norm}"
    raise NonFiniteError(
        explain(
            f"Optimizer step {step} is not finite",
            expected="a finite loss and gradient norm",
            got=got,
            where=(f"micro-batches {bad}, " if bad else "") + (f"rows {rows}" if rows else "rows unknown"),
            next_step="The adapter was not updated with it; the last good checkpoint is "
            + (f"{checkpoint}" if checkpoint else "none yet (`save_every` writes them)")
            + ". Lower `optimizer.learning_rate` or look at these rows",
        )
    )


def check_first_gradients(bank: AdapterBank) -> None:
    """Assert after the first step that the adapters are really being trained.

    Raises:
        NonFiniteError: a block's ``lora_B`` gradient holds NaN or infinity.
        PorosError: every ``lora_B`` gradient of the model is zero: the loss does not reach the adapters.
    """
    some = False
    for block, tensor, gradient in bank.tensors(bank.gradients):
        if tensor.group != "lora_B":
            continue
        if not bool(gradient.isfinite().all()):
            raise NonFiniteError(
                explain(
                    "A gradient is not finite after the first step",
                    expected="finite values",
                    got="NaN or infinity",
                    where=f"block {block}, `{tensor.path}.lora_B`",
                )
            )
        some = some or bool(gradient.any())
    if not some:
        raise PorosError(
            explain(
                "No adapter received a gradient in the first step",
                expected="a non-zero `lora_B` gradient somewhere",
                got="only zeros",
                next_step="The loss does not depend on the adapters: please report this model and config",
            )
        )
