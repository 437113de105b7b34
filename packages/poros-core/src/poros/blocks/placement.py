"""Which blocks stay on the device, and a store whose blocks live in several places."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from poros.blocks.layout import BlockLayout
from poros.blocks.store import BlockStore, DeviceStore, HostStore

__all__ = ["PlacedStore", "spread_evenly"]


def spread_evenly(count: int, num_blocks: int) -> frozenset[int]:
    """Return ``count`` of ``num_blocks`` indices as evenly spaced as can be, so that copies always have time to hide.

    More than there are is all of them.
    """
    count = min(count, num_blocks)
    return frozenset((2 * index + 1) * num_blocks // (2 * count) for index in range(count))


class PlacedStore:
    """Some blocks in device memory, the others in host memory, under the indices of the model.

    Args:
        layouts: of every block, and of what is streamed beside the blocks (the head's chunks).
        resident: indices that live on ``device``.
        device: the training device.
        pin: page-lock the host part.
    """

    def __init__(
        self, layouts: Sequence[BlockLayout], resident: frozenset[int], device: torch.device, *, pin: bool
    ) -> None:
        self.layouts = layouts
        moving = [index for index in range(len(layouts)) if index not in resident]
        staying = sorted(resident)
        self._host = HostStore([layouts[index] for index in moving], pin=pin)
        self._device = DeviceStore([layouts[index] for index in staying], device)
        self._home: dict[int, tuple[BlockStore, int]] = {
            index: (self._host, place) for place, index in enumerate(moving)
        }
        self._home |= {index: (self._device, place) for place, index in enumerate(staying)}

    def block(self, index: int) -> torch.Tensor:
        """See `BlockStore.block`."""
        store, place = self._home[index]
        return store.block(place)

    def is_pinned(self, index: int) -> bool:
        """See `BlockStore.is_pinned`."""
        store, place = self._home[index]
        return store.is_pinned(place)

    def close(self) -> None:
        """See `BlockStore.close`."""
        self._host.close()
