"""Masks, positions and rotary tables of rows that hold several samples each, so that none sees another.

Everything is derived from the tables of plain rows: a sample attends to itself alone, and a position's rotary table is
the one that it has in a row of its own. A family packs if nothing but masks and positions connects its positions.

Shape letters: B batch, T tokens, E width of a rotary table.
"""

from __future__ import annotations

from typing import Any

import torch

from poros.engine.targets import IGNORE_INDEX
from poros.errors import UserError, explain
from poros.interfaces import Architecture, BlockContext, MicroBatch

__all__ = ["PackedContext", "packed_positions"]


def packed_positions(micro_batch: MicroBatch, architecture: Architecture) -> torch.Tensor | None:
    """Return the (B, T) position ids of a packed micro-batch, None for a plain one.

    Raises:
        UserError: the architecture does not keep samples of one row apart; positions do not begin at 0 with every
            sample and count up; or a sample's first token is supervised, which only another sample could predict.
    """
    positions: torch.Tensor | None = getattr(micro_batch, "position_ids", None)
    if positions is None:
        return None
    if not architecture.packs_rows:
        raise UserError(
            explain(
                "Cannot train on packed rows",
                expected="a model whose blocks keep the samples of a row apart by their positions",
                got=f"`{architecture.name}`, which does not say so (`packs_rows`)",
                next_step="Set `rows.packing: false`",
            )
        )
    begins = positions == 0
    follows = torch.ones_like(begins)
    follows[:, 1:] = positions[:, 1:] == positions[:, :-1] + 1
    follows[:, 0] = False
    if positions.shape != micro_batch.input_ids.shape or not bool((begins | follows).all()):
        raise UserError(
            explain(
                "Bad `position_ids` of a packed micro-batch",
                expected=f"{tuple(micro_batch.input_ids.shape)} positions that begin at 0 with every sample",
                got=f"{tuple(positions.shape)} positions that do not",
            )
        )
    if bool((micro_batch.labels[begins] != IGNORE_INDEX).any()):
        raise UserError(
            explain(
                "Bad `labels` of a packed micro-batch",
                expected=f"{IGNORE_INDEX} at the first token of every sample",
                got="a supervised token, which another sample would have to predict",
            )
        )
    return positions


class PackedContext:
    """The context of packed micro-batches of one shape, at fixed addresses.

    Args:
        plain: context of unpacked rows of the same T.
        batch: B.
    """

    def __init__(self, plain: BlockContext, batch: int) -> None:
        tokens, device = plain.position_ids.shape[1], plain.position_ids.device
        self._plain = plain
        self._loaded: torch.Tensor | None = None
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()[None, None]
        self._visible = {name: causal if m is None else m for name, m in plain.attention_masks.items()}
        for name, mask in self._visible.items():
            assert mask.dtype == torch.bool, f"the mask of `{name}` is {mask.dtype}"
        # Layer types often share a mask or a table; each is made once.
        masks = {
            id(mask): torch.empty(batch, 1, tokens, tokens, dtype=torch.bool, device=device)
            for mask in self._visible.values()
        }
        tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for pair in plain.position_embeddings.values():
            tables.setdefault(id(pair[0]), tuple(t.new_empty(batch, *t.shape[1:]) for t in pair))  # type: ignore[arg-type]
        self.context = BlockContext(
            position_ids=torch.empty(batch, tokens, dtype=torch.int64, device=device),
            position_embeddings={name: tables[id(p[0])] for name, p in plain.position_embeddings.items()},
            attention_masks={name: masks[id(mask)] for name, mask in self._visible.items()},
        )

    def load(self, positions: torch.Tensor) -> BlockContext:
        """Write the masks and tables of (B, T) positions on the device and return the context that holds them."""
        if positions is self._loaded:
            return self.context
        self._loaded = positions
        self.context.position_ids.copy_(positions)
        sample = (positions == 0).cumsum(dim=1)
        same = sample[:, None, :, None] == sample[:, None, None, :]
        written: set[int] = set()
        for name, mask in self.context.attention_masks.items():
            if mask is not None and id(mask) not in written:
                written.add(id(mask))
                torch.logical_and(same, self._visible[name], out=mask)
        for name, pair in self.context.position_embeddings.items():
            for table, plain in zip(pair, self._plain.position_embeddings[name], strict=True):
                if id(table) not in written:
                    written.add(id(table))
                    torch.index_select(plain[0], 0, positions.reshape(-1), out=_flat(table))
        return self.context


def _flat(table: torch.Tensor) -> Any:
    """Return a (B, T, E) table as (B * T, E)."""
    return table.view(-1, table.shape[-1])
