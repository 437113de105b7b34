"""Sizes in words."""

from __future__ import annotations

import pytest

from poros.errors import ConfigError
from poros.units import format_bytes, format_gb, parse_size, ranges


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GB", 8 * 10**9),
        ("8GiB", 8 * 2**30),
        ("8000MB", 8 * 10**9),
        ("8000000000", 8 * 10**9),
        ("500 MB", 500 * 10**6),
        ("1.5gib", 3 * 2**29),
        ("7.5 gb", 7_500_000_000),
        ("20KB", 20_000),
    ],
)
def test_a_size_is_read(text: str, expected: int) -> None:
    assert parse_size(text, "vram") == expected


@pytest.mark.parametrize(
    "text",
    [
        "9" * 400 + "GB",
        "9" * 5000,
        "0.0001KB",
        "8",
        "GiB",
        "6 potatoes",
        "-1GB",
        "",
        "0GB",
        "8G",
        "8,5GB",
        "1e10",
        "8 GB of it",
        "0",
        "½GB",
    ],
)
def test_anything_else_is_refused_with_examples(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"`ram`: expected a size: 8GB \(8e9 bytes\), 8GiB, 8000MB, or plain bytes"
    ):
        parse_size(text, "ram")


def test_a_bare_small_number_is_asked_about() -> None:
    with pytest.raises(ConfigError, match="Did you mean `8GB`"):
        parse_size("8", "vram")


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (2048, "2.0 KiB"), (3 * 2**30, "3.00 GiB")]
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999 B"), (2_000_000, "2 MB"), (8 * 10**9, "8.00 GB"), (99 * 10**9, "99.00 GB")]
)
def test_budgets_are_shown_in_powers_of_ten(count: int, text: str) -> None:
    assert format_gb(count) == text


@pytest.mark.parametrize(
    ("numbers", "text"), [([0], "0"), ([0, 1, 2], "0-2"), ([0, 2, 3, 7], "0, 2-3, 7"), ([1, 3], "1, 3")]
)
def test_block_numbers_are_shown_as_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text
