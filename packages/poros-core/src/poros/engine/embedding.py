"""Embedding rows: gathered on the host and copied, or read from a resident table. A row copy has no rounding."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from poros.engine.loss import IGNORE_INDEX
from poros.errors import UserError, explain
from poros.interfaces import MicroBatch

__all__ = ["Embedding", "check_token_ids"]


def check_token_ids(micro_batch: MicroBatch, vocab_size: int) -> None:
    """Refuse ids and labels that the table does not have, on the host: a device would fail without naming them.

    Raises:
        UserError: an id or a label is negative (-100 apart) or not below ``vocab_size``.
    """
    labels = micro_batch.labels
    for name, tokens in (("input_ids", micro_batch.input_ids), ("labels", labels[labels != IGNORE_INDEX])):
        bad = tokens[(tokens < 0) | (tokens >= vocab_size)]
        if bad.numel():
            raise UserError(
                explain(
                    "A token is not in the model's vocabulary",
                    expected=f"ids from 0 to {vocab_size - 1}",
                    got=int(bad[0]),
                    where=f"`{name}` of a micro-batch",
                    next_step="Use the tokenizer that belongs to these weights",
                )
            )


class Embedding:
    """The frozen token table.

    Args:
        table: (V, D) in the storage dtype; on the CPU rows are gathered there, on the device no host memory is read.
        device: where hidden states go.
        compute_dtype: dtype of the hidden states.
        scale: 0-d factor of the rows, already rounded as the architecture does, or None.
    """

    def __init__(
        self,
        table: torch.Tensor,
        device: torch.device,
        compute_dtype: torch.dtype,
        scale: torch.Tensor | None,
    ) -> None:
        self.table = table
        self._device = device
        self._compute_dtype = compute_dtype
        self._scale = scale

    @property
    def num_tokens(self) -> int:
        """V of the table."""
        return int(self.table.shape[0])

    @torch.no_grad()
    def rows(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return (B, T, D) hidden states of (B, T) ids, which are on the CPU."""
        ids = input_ids.to(self.table.device)
        rows = F.embedding(ids, self.table).to(self._device, non_blocking=True)
        if self._scale is not None:
            rows = rows * self._scale.to(rows.device)
        return rows.to(self._compute_dtype)
