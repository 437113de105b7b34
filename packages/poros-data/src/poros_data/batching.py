"""Rows side by side: right-padded micro-batches.

Shape letters: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from poros_data.errors import DataError, explain
from poros_data.rows import IGNORED, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Batch", "eval_batches", "make_batches", "padding_id"]


@dataclass(eq=False, slots=True)  # not frozen: the engine's protocol declares plain attributes
class Batch:
    """Rows that go through the model together, right-padded to one length.

    Attributes:
        input_ids: (B, T) int64 on the CPU.
        labels: (B, T) int64 on the CPU, not shifted, -100 where not supervised. Padding is -100 by position:
            the padding id may be the end-of-turn token, which real positions do train.
        row_ids: indices into the rows, in order; B of them unless rows are packed.
        position_ids: (B, T) int64 on the CPU of a run that packs rows: they begin at 0 again with every row, and with
            the padding behind the last one. None of one that does not.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    row_ids: tuple[int, ...]
    position_ids: torch.Tensor | None = None


def eval_batches(
    rows: Sequence[Row], *, micro_batch_size: int, length_bucket: int, pad_id: int
) -> list[Batch]:
    """Return every row once, in order, in right-padded batches of up to ``micro_batch_size`` rows."""
    units = [(row,) for row in range(len(rows))]
    return make_batches(
        rows, units, micro_batch_size=micro_batch_size, length_bucket=length_bucket, pad_id=pad_id
    )


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id to pad with: the tokenizer's padding token, else its end-of-text token.

    Which one does not matter: padding is masked by position, and no real token attends to a later one.

    Raises:
        DataError: the tokenizer has neither.
    """
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    raise DataError(
        explain(
            "Cannot pad rows",
            expected="a tokenizer with a `pad_token` or an `eos_token`",
            got="neither",
            where=str(tokenizer.name_or_path) or None,
            next_step="Set one in the model's `tokenizer_config.json`",
        )
    )


def make_batches(
    rows: Sequence[Row],
    units: Sequence[tuple[int, ...]],
    *,
    micro_batch_size: int,
    length_bucket: int,
    pad_id: int,
    packed: bool = False,
) -> list[Batch]:
    """Return micro-batches of up to ``micro_batch_size`` units, in order.

    Args:
        rows: tokenized rows.
        units: indices of rows that stand behind each other in one row of a batch; one index each without packing.
        micro_batch_size: B of a full micro-batch.
        length_bucket: T is rounded up to a multiple of this.
        pad_id: id of padded positions.
        packed: give every batch `Batch.position_ids`, also one whose rows hold one row each: all of a run's batches
            go through the same kernels.
    """
    return [
        _pad(rows, units[start : start + micro_batch_size], length_bucket, pad_id, packed=packed)
        for start in range(0, len(units), micro_batch_size)
    ]


def _pad(
    rows: Sequence[Row], units: Sequence[tuple[int, ...]], length_bucket: int, pad_id: int, *, packed: bool
) -> Batch:
    longest = max(sum(len(rows[row].input_ids) for row in unit) for unit in units)
    B, T = len(units), -(-longest // length_bucket) * length_bucket
    input_ids = torch.full((B, T), pad_id, dtype=torch.int64)
    labels = torch.full((B, T), IGNORED, dtype=torch.int64)
    position_ids = torch.zeros((B, T), dtype=torch.int64)
    for index, unit in enumerate(units):
        start = 0
        for row in unit:
            end = start + len(rows[row].input_ids)
            input_ids[index, start:end] = torch.tensor(rows[row].input_ids, dtype=torch.int64)
            labels[index, start:end] = torch.tensor(rows[row].labels, dtype=torch.int64)
            position_ids[index, start:end] = torch.arange(end - start)
            start = end
        position_ids[index, start:] = torch.arange(T - start)
    row_ids = tuple(row for unit in units for row in unit)
    return Batch(input_ids, labels, row_ids, position_ids if packed else None)
