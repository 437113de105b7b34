"""Checks of every step before the optimizer may use it, and what to say when memory runs out."""

from __future__ import annotations

import contextlib
import errno
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from poros.bank import AdapterBank
from poros.errors import BudgetError, NonFiniteError, PorosError, explain
from poros.interfaces import MicroBatch
from poros.planning.planner import PlannedRun
from poros.run.device import describe_device
from poros.run.totals import shape_of
from poros.units import list_terms

__all__ = ["check_first_gradients", "check_step_finite", "explaining_out_of_memory", "is_out_of_host_memory"]


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


@contextlib.contextmanager
def explaining_out_of_memory(
    device: torch.device,
    planned: PlannedRun,
    largest: Sequence[MicroBatch],
    checkpoint: Callable[[], Path | None],
) -> Iterator[None]:
    """Turn an out-of-memory error of the device or the host into one that names what was predicted and what helps.

    Args:
        device: of the run.
        planned: its plan.
        largest: micro-batches of the largest step.
        checkpoint: returns the newest checkpoint, to be named.

    Raises:
        BudgetError: instead of `torch.OutOfMemoryError`, `MemoryError` or what else says that host memory is refused.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise BudgetError(
            explain(
                f"{describe_device(device)} ran out of memory",
                expected=f"room for what was predicted: {list_terms(planned.prediction.device)}",
                got=" ".join(str(error).split()),
                where=f"the largest step: {_described(largest)}",
                next_step="Lower `micro_batch_size`, `max_length` or `vram`; the last checkpoint is "
                + f"{checkpoint() or 'none yet'}",
            )
        ) from error
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_host_memory(error):
            raise
        raise BudgetError(
            explain(
                "Host memory ran out",
                expected=f"room for what was predicted: {list_terms(planned.prediction.host)}",
                got=" ".join(str(error).split()) or type(error).__name__,
                where=planned.budget.host_limit,
                next_step=f"Free some memory or raise that limit; the last checkpoint is {checkpoint() or 'none yet'}",
            )
        ) from error


def is_out_of_host_memory(error: Exception) -> bool:
    """Return whether an allocation on the host was refused; torch says so in words only."""
    if isinstance(error, RuntimeError):
        return "DefaultCPUAllocator" in str(error) or "std::bad_alloc" in str(error)
    return isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM


def _described(largest: Sequence[MicroBatch]) -> str:
    shape = shape_of(largest)
    rows = [row for batch in largest for row in getattr(batch, "row_ids", ())]
    named = f", rows {rows}" if rows else ""
    size = f"{shape.micro_batch_size} x {shape.tokens}"
    return f"{shape.num_micro_batches} micro-batches of up to {size} tokens{named}"
