"""Byte counts in words, both ways; block numbers in words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from poros.errors import ConfigError, explain

__all__ = ["GB", "format_bytes", "format_gb", "list_terms", "parse_size", "ranges"]

GB = 10**9
# GB is what cards are sold by, GiB what tools show.
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)", re.IGNORECASE)
# A smaller number without a unit is a number of something else: nothing trains in a megabyte.
# Longer texts name no memory that exists.
LONGEST = 32
LEAST_PLAIN_BYTES = 10**6
EXAMPLES = "8GB (8e9 bytes), 8GiB, 8000MB, or plain bytes such as 8000000000"


def parse_size(text: str, name: str) -> int:
    """Return the bytes that a text like ``8GB``, ``7.5 GiB``, ``8000MB`` or ``8000000000`` means.

    Args:
        text: what the user wrote.
        name: the setting, for the message.

    Raises:
        ConfigError: it is none of these; examples are named.
    """
    stripped = text.strip()
    match = SIZE.fullmatch(stripped) if len(stripped) <= LONGEST else None
    if match is not None and (count := int(float(match[1]) * UNITS[match[2].upper()])) > 0:
        return count
    plain = stripped.isascii() and stripped.isdecimal() and len(stripped) <= LONGEST
    if plain and int(stripped) >= LEAST_PLAIN_BYTES:
        return int(stripped)
    hint = f"Did you mean `{stripped}GB`?" if plain and int(stripped) > 0 else None
    raise ConfigError(
        explain(f"Bad setting `{name}`", expected=f"a size: {EXAMPLES}", got=repr(text), next_step=hint)
    )


def format_bytes(count: float) -> str:
    """Return bytes for people, in the largest binary unit that keeps a digit before the point."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def format_gb(count: float) -> str:
    """Return bytes for people in the units of memory budgets, powers of ten."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def list_terms(terms: Mapping[str, int]) -> str:
    """Return the terms with their sizes, largest first."""
    ordered = sorted(terms.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {format_gb(count)}" for name, count in ordered if count)


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ``0-3, 5, 7-8``."""
    parts: list[str] = []
    start = previous = numbers[0]
    for number in [*numbers[1:], None]:
        if number is not None and number == previous + 1:
            previous = number
            continue
        parts.append(f"{start}" if start == previous else f"{start}-{previous}")
        if number is not None:
            start = previous = number
    return ", ".join(parts)
