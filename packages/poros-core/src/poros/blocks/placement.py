"""Where each block lives, and a store whose blocks live in several places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from poros.blocks.block_file import BlockFile
from poros.blocks.layout import BlockLayout
from poros.blocks.store import BlockStore, DeviceStore, HostStore
from poros.settings import Plan

__all__ = ["PlacedStore", "place_blocks", "spread_evenly"]


def spread_evenly(count: int, num_blocks: int) -> frozenset[int]:
    """Return ``count`` of ``num_blocks`` indices as evenly spaced as can be, so that copies always have time to hide.

    More than there are is all of them.
    """
    count = min(count, num_blocks)
    return frozenset((2 * index + 1) * num_blocks // (2 * count) for index in range(count))


def place_blocks(plan: Plan, num_blocks: int) -> tuple[frozenset[int], frozenset[int]]:
    """Return the blocks that stay on the device and those that come from the disk; the others are in host memory."""
    if plan.residency == "resident":
        return frozenset(range(num_blocks)), frozenset()
    resident = spread_evenly(plan.resident_blocks, num_blocks)
    streamed = [block for block in range(num_blocks) if block not in resident]
    # Among those that move, so that a read has the visits of its neighbours to hide behind.
    return resident, frozenset(streamed[place] for place in spread_evenly(plan.disk_blocks, len(streamed)))


class PlacedStore:
    """Blocks in device memory, in host memory and on the disk, under the indices of the model.

    Args:
        layouts: of every block, and of what is streamed beside the blocks (the head's chunks).
        resident: indices that live on ``device``.
        device: the training device.
        pin: page-lock the host part.
        on_disk: indices that get no memory; `attach` brings their files.
    """

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        resident: frozenset[int],
        device: torch.device,
        *,
        pin: bool,
        on_disk: frozenset[int] = frozenset(),
    ) -> None:
        assert not resident & on_disk
        self.layouts = layouts
        self.on_disk = on_disk
        self.files: Mapping[int, BlockFile] = {}
        moving = [index for index in range(len(layouts)) if index not in resident | on_disk]
        staying = sorted(resident)
        self._host = HostStore([layouts[index] for index in moving], pin=pin)
        self._device = DeviceStore([layouts[index] for index in staying], device)
        self._home: dict[int, tuple[BlockStore, int]] = {
            index: (self._host, place) for place, index in enumerate(moving)
        }
        self._home |= {index: (self._device, place) for place, index in enumerate(staying)}

    def attach(self, files: Mapping[int, BlockFile]) -> None:
        """Take the files of the blocks on the disk."""
        assert files.keys() == self.on_disk
        self.files = files

    def block(self, index: int) -> torch.Tensor:
        """See `BlockStore.block`."""
        if index in self.on_disk:
            target = torch.empty(self.layouts[index].num_bytes, dtype=torch.uint8)
            self.files[index].read_into(target)
            return target
        store, place = self._home[index]
        return store.block(place)

    def is_pinned(self, index: int) -> bool:
        """See `BlockStore.is_pinned`."""
        if index in self.on_disk:
            return False
        store, place = self._home[index]
        return store.is_pinned(place)

    def close(self) -> None:
        """See `BlockStore.close`."""
        self._host.close()
        for file in self.files.values():
            file.close()
