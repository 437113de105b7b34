"""Where blocks live: a host store that is streamed from, or a device store that never moves."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch

from poros.blocks.block_file import BlockFile
from poros.blocks.host_memory import HostArena
from poros.blocks.layout import BlockLayout

__all__ = ["BlockStore", "DeviceStore", "HostStore", "checksum"]


class BlockStore(Protocol):
    """The home of every block's bytes. Immutable once filled: `checksum` before and after a run must agree.

    Attributes:
        layouts: of every block.
        on_disk: the blocks that have no memory of their own.
        files: theirs, by block, once the store is filled.
    """

    layouts: Sequence[BlockLayout]
    on_disk: frozenset[int]
    files: Mapping[int, BlockFile]

    def block(self, index: int) -> torch.Tensor:
        """Return the (num_bytes,) uint8 bytes of a block where they live: a view. Of one on the disk, a copy."""
        ...

    def is_pinned(self, index: int) -> bool:
        """Whether an asynchronous copy may read the block directly."""
        ...

    def close(self) -> None:
        """Release page locks and files."""
        ...


class HostStore:
    """Every block in one host arena, page-locked as far as the system allows."""

    on_disk: frozenset[int] = frozenset()
    files: Mapping[int, BlockFile] = MappingProxyType({})

    def __init__(self, layouts: Sequence[BlockLayout], *, pin: bool) -> None:
        self.layouts = layouts
        self.arena = HostArena([layout.num_bytes for layout in layouts], pin=pin)

    def block(self, index: int) -> torch.Tensor:
        """See `BlockStore.block`."""
        return self.arena.region(index)

    def is_pinned(self, index: int) -> bool:
        """See `BlockStore.is_pinned`."""
        return self.arena.pinned[index]

    def close(self) -> None:
        """See `BlockStore.close`."""
        self.arena.close()


class DeviceStore:
    """Every block in a device buffer of its own: the resident oracle. Nothing here reads host memory."""

    on_disk: frozenset[int] = frozenset()
    files: Mapping[int, BlockFile] = MappingProxyType({})

    def __init__(self, layouts: Sequence[BlockLayout], device: torch.device) -> None:
        self.layouts = layouts
        self._buffers = [
            torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device) for layout in layouts
        ]

    def block(self, index: int) -> torch.Tensor:
        """See `BlockStore.block`."""
        return self._buffers[index]

    def is_pinned(self, index: int) -> bool:
        """Device memory is never the source of a host copy."""
        return False

    def close(self) -> None:
        """Nothing to unlock."""


def checksum(store: BlockStore) -> str:
    """Return the SHA-256 of every block's bytes, in order."""
    digest = hashlib.sha256()
    for index in range(len(store.layouts)):
        digest.update(store.block(index).cpu().numpy().data)
    return digest.hexdigest()
