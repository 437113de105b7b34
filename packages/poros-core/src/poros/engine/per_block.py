"""The second token table of families whose every block reads its own input (Gemma 4 E2B: per-layer embeddings).

The table is the largest tensor of such a model and is read one row per token: while blocks are streamed it stays in
host memory and only the rows of a micro-batch travel.

Shape letters: B batch, T tokens, D hidden size, L blocks, P elements of a per-block input, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn

from poros.engine.embedding import Embedding
from poros.interfaces import Architecture, PerBlockInputs

__all__ = ["PerBlockTable"]


class PerBlockTable:
    """Makes the inputs of all blocks of a micro-batch. Frozen, and without gradient.

    Attributes:
        declared: what the architecture said.
        embedding: the (V, L * P) table and how its rows are gathered.
        modules: the modules that mix the rows in, on the device.

    Args:
        architecture: how rows and hidden states are mixed.
        model: what it built, on the meta device.
    """

    def __init__(
        self,
        declared: PerBlockInputs,
        embedding: Embedding,
        modules: dict[str, nn.Module],
        architecture: Architecture,
        model: nn.Module,
    ) -> None:
        self.declared = declared
        self.embedding = embedding
        self.modules = modules
        self._architecture = architecture
        self._model = model

    @torch.no_grad()
    def inputs(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return (B, T, L, P) inputs of (B, T) ids, which are on the CPU, and of (B, T, D) hidden states."""
        rows = hidden.new_empty(*hidden.shape[:2], self.embedding.width)
        self.embedding.write(input_ids, rows)
        return self._architecture.mix_per_block_inputs(self._model, self.modules, hidden, rows)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor by its name in the checkpoint."""
        named = {f"{self.declared.table}.weight": self.embedding.table}
        for path, module in self.modules.items():
            named |= {f"{path}.{name}": tensor for name, tensor in module.state_dict().items()}
        return named
