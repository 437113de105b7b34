"""Embedding rows: gathered on the host and copied, or read from a resident table. A row copy has no rounding."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["Embedding"]


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

    @torch.no_grad()
    def rows(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return (B, T, D) hidden states of (B, T) ids, which are on the CPU."""
        ids = input_ids.to(self.table.device)
        rows = F.embedding(ids, self.table).to(self._device, non_blocking=True)
        if self._scale is not None:
            rows = rows * self._scale.to(rows.device)
        return rows.to(self._compute_dtype)
