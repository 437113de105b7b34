"""From numbers to round ticks, and from many points to as many as a picture can show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

__all__ = ["drawable", "thin", "ticks"]

Point = tuple[float, float]

# A picture of this many points is as wide as a phone has pixels.
MAX_POINTS = 400
# Beyond, differences overflow; no training is that large.
LARGEST = 1e100
# Numbers closer than this, relative to their size, are one number.
RESOLUTION = 1e-9


def ticks(least: float, largest: float, intervals: int = 6) -> list[float]:
    """Return ascending round numbers, about ``intervals`` apart, that enclose both ends."""
    if largest - least <= RESOLUTION * max(abs(least), abs(largest)):
        margin = abs(largest) / 10 or 1.0
        least, largest = least - margin, largest + margin
    rough = (largest - least) / intervals
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    first, last = math.floor(round(least / step, 6)), math.ceil(round(largest / step, 6))
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def drawable(points: Sequence[Point]) -> list[Point]:
    """Return the points that a picture can hold: no NaN, no infinity."""
    return [(x, y) for x, y in points if abs(y) < LARGEST]


def thin(points: Sequence[Point], combine: Callable[[Sequence[float]], float]) -> tuple[list[Point], int]:
    """Put neighbours together until at most `MAX_POINTS` are left; return them and how many make one.

    Args:
        points: ascending.
        combine: makes one value of a group's; the group stands at its last place.
    """
    size = math.ceil(len(points) / MAX_POINTS) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], combine([y for _, y in group])) for group in groups], size
