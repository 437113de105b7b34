"""Micro-batches of every optimizer step, as a pure function of the step's index.

Shape letters: B batch, T tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from poros_data.errors import DataError, explain
from poros_data.rows import IGNORED, Row, digest_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Batch", "StepPlan", "eval_batches", "padding_id"]


@dataclass(eq=False, slots=True)  # not frozen: the engine's protocol declares plain attributes
class Batch:
    """Rows that go through the model together, right-padded to one length.

    Attributes:
        input_ids: (B, T) int64 on the CPU.
        labels: (B, T) int64 on the CPU, not shifted, -100 where not supervised. Padding is -100 by position:
            the padding id may be the end-of-turn token, which real positions do train.
        row_ids: (B,) indices into the rows.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    row_ids: tuple[int, ...]


class StepPlan:
    """A `poros.interfaces.StepSource` over tokenized rows.

    Each epoch visits every row once, in file order or shuffled by (seed, epoch). It is cut into micro-batches
    of ``micro_batch_size`` rows and steps of ``micro_batches_per_step`` micro-batches; the last micro-batch
    and the last step of an epoch keep what is left. No step holds rows of two epochs.

    Attributes:
        num_steps: optimizer steps of the run.
        steps_per_epoch: optimizer steps of one epoch.
        fingerprint: sha256 of the rows' tokens and of every setting that decides what a step reads. The
            length of the
            run is left out: a longer run reads the same steps first.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        micro_batch_size: int,
        micro_batches_per_step: int,
        length_bucket: int,
        pad_id: int,
        seed: int,
        num_epochs: int | None = None,
        max_steps: int | None = None,
        shuffle: bool = True,
    ) -> None:
        """Plan the steps.

        Args:
            rows: tokenized rows.
            micro_batch_size: B of a full micro-batch.
            micro_batches_per_step: gradient accumulation.
            length_bucket: T is rounded up to a multiple of this.
            pad_id: id of padded positions (see `padding_id`).
            seed: decides the order together with the epoch.
            num_epochs, max_steps: the length of the run; with both, the shorter; ``max_steps`` alone repeats
                the rows as often as it needs.
            shuffle: keep the order of the file if False.

        Raises:
            DataError: no rows, a number below 1, or neither ``num_epochs`` nor ``max_steps``.
        """
        numbers = {
            "micro_batch_size": micro_batch_size,
            "micro_batches_per_step": micro_batches_per_step,
            "length_bucket": length_bucket,
            "num_epochs": num_epochs,
            "max_steps": max_steps,
        }
        for name, number in numbers.items():
            if number is not None and number < 1:
                raise DataError(explain(f"Bad setting `{name}`", expected="1 or more", got=number))
        if not rows:
            raise DataError(explain("Cannot plan steps", expected="at least one row", got="none"))
        self._rows = rows
        self._micro_batch_size = micro_batch_size
        self._rows_per_step = micro_batch_size * micro_batches_per_step
        self._length_bucket = length_bucket
        self._pad_id = pad_id
        self._seed = seed
        self._shuffle = shuffle
        self._cached_order: tuple[int, list[int]] | None = None
        self.steps_per_epoch = -(-len(rows) // self._rows_per_step)
        lengths = [max_steps] if max_steps is not None else []
        if num_epochs is not None:
            lengths.append(num_epochs * self.steps_per_epoch)
        if not lengths:
            raise DataError(
                explain("Cannot plan steps", expected="`num_epochs` or `max_steps`", got="neither of them")
            )
        self.num_steps = min(lengths)
        self.fingerprint = _sha256(
            {
                "rows": digest_rows(rows),
                "micro_batch_size": micro_batch_size,
                "micro_batches_per_step": micro_batches_per_step,
                "length_bucket": length_bucket,
                "pad_id": pad_id,
                "seed": seed if shuffle else None,
            }
        )

    def step(self, index: int) -> list[Batch]:
        """Return the micro-batches of optimizer step ``index`` (0-based). Raises `IndexError` outside the run."""
        if not 0 <= index < self.num_steps:
            raise IndexError(f"step {index} of {self.num_steps}")
        epoch, place = divmod(index, self.steps_per_epoch)
        order = self._order(epoch)
        start = place * self._rows_per_step
        return _batches(
            self._rows,
            order[start : start + self._rows_per_step],
            micro_batch_size=self._micro_batch_size,
            length_bucket=self._length_bucket,
            pad_id=self._pad_id,
        )

    def _order(self, epoch: int) -> list[int]:
        """Sort by a hash: the same order on every platform and library version, which generators do not promise."""
        if self._cached_order is None or self._cached_order[0] != epoch:
            order = list(range(len(self._rows)))
            if self._shuffle:
                order.sort(key=lambda row: hashlib.sha256(f"{self._seed}:{epoch}:{row}".encode()).digest())
            self._cached_order = epoch, order
        return self._cached_order[1]


def eval_batches(
    rows: Sequence[Row], *, micro_batch_size: int, length_bucket: int, pad_id: int
) -> list[Batch]:
    """Return every row once, in order, in right-padded batches of up to ``micro_batch_size`` rows."""
    return _batches(
        rows, range(len(rows)), micro_batch_size=micro_batch_size, length_bucket=length_bucket, pad_id=pad_id
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


def _batches(
    rows: Sequence[Row], order: Sequence[int], *, micro_batch_size: int, length_bucket: int, pad_id: int
) -> list[Batch]:
    return [
        _pad(rows, tuple(order[start : start + micro_batch_size]), length_bucket=length_bucket, pad_id=pad_id)
        for start in range(0, len(order), micro_batch_size)
    ]


def _pad(rows: Sequence[Row], row_ids: tuple[int, ...], *, length_bucket: int, pad_id: int) -> Batch:
    longest = max(len(rows[row].input_ids) for row in row_ids)
    T = -(-longest // length_bucket) * length_bucket
    input_ids = torch.full((len(row_ids), T), pad_id, dtype=torch.int64)
    labels = torch.full((len(row_ids), T), IGNORED, dtype=torch.int64)
    for position, row in enumerate(row_ids):
        length = len(rows[row].input_ids)
        input_ids[position, :length] = torch.tensor(rows[row].input_ids, dtype=torch.int64)
        labels[position, :length] = torch.tensor(rows[row].labels, dtype=torch.int64)
    return Batch(input_ids, labels, row_ids)


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
