"""Which rows share one row of a micro-batch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

__all__ = ["pack"]

# Packs that are open at a time. More fill a little better, and move rows further away from their shuffled place.
MAX_OPEN = 256


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put every row into the open pack that it fills best; one that fits nowhere opens a pack.

    Args:
        lengths: of the rows, in the order of the epoch.
        capacity: tokens of a pack; a longer row has one of its own.

    Returns:
        Per pack the indices of its rows, ascending. Packs are in the order of their first row.
    """
    packs: list[list[int]] = []
    space: list[tuple[int, int]] = []  # (free tokens, pack) of the open ones, ascending
    for index, length in enumerate(lengths):
        place = bisect_left(space, (length, -1))
        if place < len(space):
            free, chosen = space.pop(place)
        else:
            free, chosen = capacity, len(packs)
            packs.append([])
        packs[chosen].append(index)
        if free > length:
            insort(space, (free - length, chosen))
        if len(space) > MAX_OPEN:
            del space[0]  # the fullest
    return packs
