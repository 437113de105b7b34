"""Embedding rows: gathered on the host and copied, or read from a resident table. A row copy has no rounding.

Shape letters: B batch, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from poros.blocks.copy_lane import mark
from poros.blocks.host_memory import HostArena
from poros.engine.targets import IGNORE_INDEX
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
        scale: 0-d factor of the rows in ``compute_dtype``, or None. Transformers rounds it to the dtype that the model
            is loaded in.
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
        self._staged = table.device.type == "cpu" and device.type == "cuda"
        self._arena: HostArena | None = None
        self._staging = torch.empty(0, dtype=table.dtype)
        self._used = 0
        self._done: torch.cuda.Event | None = None

    @property
    def num_tokens(self) -> int:
        """V of the table."""
        return int(self.table.shape[0])

    @property
    def width(self) -> int:
        """D of the table."""
        return int(self.table.shape[1])

    def begin(self, num_positions: int) -> None:
        """Start a pass over at most ``num_positions`` rows: its copies need page-locked memory to be asynchronous."""
        if not self._staged:
            return
        if self._done is not None:
            self._done.synchronize()
        self._used = 0
        needed = num_positions * self.table.shape[1]
        if needed > self._staging.numel():
            self.close()
            self._arena = HostArena([needed * self.table.dtype.itemsize], pin=True)
            self._staging = self._arena.region(0).view(self.table.dtype)

    @torch.no_grad()
    def write(self, input_ids: torch.Tensor, target: torch.Tensor) -> None:
        """Write the rows of (B, T) ids, which are on the CPU, to (B, T, D) hidden states."""
        if not self._staged:
            target.copy_(self.rows(input_ids))
            return
        ids = input_ids.reshape(-1)
        count = ids.numel() * self.table.shape[1]
        staged = self._staging[self._used : self._used + count].view(ids.numel(), -1)
        self._used += count
        torch.index_select(self.table, 0, ids, out=staged)
        target.copy_(self._scaled(staged.to(self._device, non_blocking=True)).view_as(target))
        self._done = mark(self._device)

    @torch.no_grad()
    def rows(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return (B, T, D) hidden states of (B, T) ids, which are on the CPU."""
        rows = F.embedding(input_ids.to(self.table.device), self.table)
        return self._scaled(rows.to(self._device))

    def _scaled(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.to(self._compute_dtype)
        return rows if self._scale is None else rows * self._scale.to(rows.device)

    def close(self) -> None:
        """Release the page lock."""
        if self._arena is not None:
            self._arena.close()
