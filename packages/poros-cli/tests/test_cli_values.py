"""YAML values: what each declared type accepts, and the traps of YAML 1.1 that do not pass in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import yaml

from poros.errors import ConfigError
from poros_cli.values import Dtype, convert, describe


def value(text: str, annotation: Any) -> Any:
    return convert(yaml.compose(text, Loader=yaml.SafeLoader), annotation, "key", "here")


@pytest.mark.parametrize(
    ("text", "annotation", "expected"),
    [
        ("2e-4", float, 2e-4),
        ("2E4", float, 2e4),
        ("1", float, 1.0),
        ("-.5", float, -0.5),
        ("1_000", int, 1000),
        ("-3", int, -3),
        ("true", bool, True),
        ("off", bool, False),
        ("plain", str, "plain"),
        ("2024-01-01", str, "2024-01-01"),
        ("7", str, "7"),
        ("'no'", str, "no"),
        ("bfloat16", Dtype, torch.bfloat16),
        ("null", int | None, None),
        ("", int | None, None),
        ("3", int | None, 3),
        ("[a, b]", tuple[str, ...] | None, ("a", "b")),
        ("[1, 2]", tuple[int, ...], (1, 2)),
        ("{a.b: 1}", Mapping[str, int], {"a.b": 1}),
        ("{a: 1e-1}", Mapping[str, float], {"a": 0.1}),
    ],
)
def test_value_is_read_as_declared(text: str, annotation: Any, expected: Any) -> None:
    got = value(text, annotation)
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(
    ("text", "annotation", "message"),
    [
        ("010", int, "Remove the leading zero"),
        ("1:30", int, "expected an integer"),
        ("1e3", int, "expected an integer"),
        ("1.0", int, "expected an integer"),
        ("0x10", int, "expected an integer"),
        ("true", int, "expected an integer, got `true`"),
        ("'3'", int, "Remove the quotes"),
        ("'2e-4'", float, "Remove the quotes"),
        ("yes", float, "expected a number"),
        (".inf", float, "expected a number"),
        ("1e999", float, "expected a number"),
        (".nan", float, "expected a number"),
        ("no", str, "Quote it if the text `no` is meant"),
        ("!tag x", str, "expected text"),
        ("1", bool, "expected true or false"),
        ("'true'", bool, "expected true or false"),
        ("null", int, "got nothing.*Remove the key to keep the default"),
        ("", str, "got nothing"),
        ("[a]", str, "expected text, got a list"),
        ("{a: b}", int, "got a mapping"),
        ("q, v", tuple[str, ...], r"Write `\[q, v\]`"),
        ("[a, [b]]", tuple[str, ...], "expected text, got a list"),
        ("[1]", Mapping[str, int], "expected a mapping to an integer, got a list"),
        ("{a: x}", Mapping[str, int], "`key.a`: expected an integer"),
        ("{a: 1, a: 2}", Mapping[str, int], "expected each key once"),
        ("{[a]: 1}", Mapping[str, int], "expected a mapping"),
        ("float16", Dtype, "expected bfloat16 or float32, got `float16`"),
    ],
)
def test_value_that_would_change_its_meaning_is_refused(text: str, annotation: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        value(text, annotation)


def test_optional_types_say_so() -> None:
    assert describe(int | None) == "an integer or null"
