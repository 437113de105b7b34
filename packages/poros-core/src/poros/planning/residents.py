"""Which blocks of a streamed run stay on the device."""

from __future__ import annotations

import functools

__all__ = ["resident_set"]


@functools.cache
def resident_set(count: int, num_blocks: int) -> frozenset[int]:
    """TEMPORARY until poros.blocks.placement is on main."""
    count = min(count, num_blocks)
    return frozenset((2 * index + 1) * num_blocks // (2 * count) for index in range(count))
