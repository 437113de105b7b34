"""What two measurements say together: the floor, the share of it that is reached, the slowdown of streaming."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["bound_share", "slowdown", "with_floor"]


def bound_share(step_seconds: float, *, compute_floor: float, h2d_bytes: float, link: float) -> float:
    """Return ``max(compute floor, bytes / link) / step``: 1 means that nothing is left to hide.

    Args:
        compute_floor: seconds of the resident step with the same numerics.
        h2d_bytes: bytes that the step moves to the device.
        link: measured rate in bytes per second.
    """
    return max(compute_floor, h2d_bytes / link) / step_seconds


def slowdown(streamed: Mapping[str, Any], resident: Mapping[str, Any]) -> float:
    """Return how many times longer the streamed step takes."""
    return float(streamed["step_seconds"] / resident["step_seconds"])


def with_floor(streamed: Mapping[str, Any], resident: Mapping[str, Any]) -> dict[str, Any]:
    """Return the streamed result with what only both together say."""
    link = streamed["link_bytes_per_second"]
    return {
        **streamed,
        "compute_floor_seconds": resident["step_seconds"],
        "link_floor_seconds": streamed["h2d_bytes_per_step"] / link,
        "bound_share": bound_share(
            streamed["step_seconds"],
            compute_floor=resident["step_seconds"],
            h2d_bytes=streamed["h2d_bytes_per_step"],
            link=link,
        ),
        "slowdown": slowdown(streamed, resident),
    }
