"""A store that keeps nothing: every visit reads its block from the files again.

For one pass over a model that need not fit into host memory, where a run's store would be read many times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from poros.blocks.block_file import BlockFile
from poros.blocks.fill import BlockFiller
from poros.blocks.layout import BlockLayout
from poros.engine.engine import Engine
from poros.model import LoadedModel, initial_bank, load_ends
from poros.run.opening import OpenModel
from poros.settings import Plan

__all__ = ["FileStore", "engine_over_files"]

# The block that computes and the one that is read for it.
NUM_SLOTS = 2


class FileStore:
    """A `BlockStore` with one buffer, filled when a block is asked for: a view lasts until the next one is.

    Args:
        model: the open model.
        device: where weights are quantized.

    Memory:
        One block and one weight.
    """

    on_disk: frozenset[int] = frozenset()
    files: Mapping[int, BlockFile] = MappingProxyType({})

    def __init__(self, model: OpenModel, device: torch.device) -> None:
        meta = model.meta
        self._meta = meta
        kind_of = {block: kind for kind in meta.kinds for block in kind.blocks}
        self.layouts: Sequence[BlockLayout] = [kind_of[index].layout for index in range(len(meta.blocks))]
        self._filler = BlockFiller(model.source, model.weight_format, model.numerics.storage_dtype, device)
        self._buffer = torch.zeros(max(layout.num_bytes for layout in self.layouts), dtype=torch.uint8)
        self._held: int | None = None

    def block(self, index: int) -> torch.Tensor:
        """Read a block; see `BlockStore.block`."""
        layout = self.layouts[index]
        view = self._buffer[: layout.num_bytes]
        if self._held != index:
            self._held = None
            self._filler.fill(self._meta.blocks[index], f"{self._meta.parts.blocks}.{index}.", layout, view)
            self._held = index
        return view

    def is_pinned(self, index: int) -> bool:
        """See `BlockStore.is_pinned`."""
        return False

    def close(self) -> None:
        """Nothing to unlock."""


def engine_over_files(model: OpenModel, device: torch.device) -> Engine:
    """Return an engine whose blocks come from the files in every pass.

    Memory:
        The vocabulary matrices, one block on the host and `NUM_SLOTS` on the device.
    """
    store = FileStore(model, device)
    loaded = LoadedModel(
        meta=model.meta,
        numerics=model.numerics,
        device=device,
        store=store,
        resident=frozenset(),
        bank=initial_bank(model.meta, device, seed=0),
        **load_ends(model.meta, model.source, model.numerics, device, store, is_resident=False),
    )
    return Engine(loaded, Plan(num_slots=NUM_SLOTS, graphs=False), seed=0)
