"""Turning one YAML node into the type that a setting declares.

PyYAML reads YAML 1.1, which knows traps: ``2e-4`` is text, ``010`` is eight, ``1:30`` is ninety, ``no`` is false. The
text of a scalar is therefore read by the type that is wanted, and whatever would change its meaning is refused.
"""

from __future__ import annotations

import math
import re
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

import yaml

from poros.errors import ConfigError, explain
from poros.settings import DTYPE_NAMES, named_dtypes

__all__ = ["TAG", "Dtype", "convert", "describe", "dtype_name"]

TAG = "tag:yaml.org,2002:"
# Plain scalars that YAML takes for something else and that are still legitimate names: a folder called 2024-01-01.
TEXT_TAGS = ("str", "int", "float", "timestamp", "value")
INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
NUMBER = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
# Python converts no longer ones by default.
LONGEST_NUMBER = 4000
NAMES = {str: "text", int: "an integer", float: "a number", bool: "true or false"}


class Dtype:
    """Stands for ``torch.dtype`` in the types of settings: to name and describe them takes no torch."""


def dtype_name(value: object) -> str | None:
    """Return what a config file calls a torch dtype, None for any other value."""
    torch = sys.modules.get("torch")  # who holds a dtype has imported it
    return str(value).removeprefix("torch.") if torch and isinstance(value, torch.dtype) else None


def convert(node: yaml.Node | None, annotation: Any, path: str, where: str) -> Any:
    """Return the value of ``node`` as ``annotation``.

    Args:
        node: composed YAML, or None for an empty document.
        annotation: str, int, float, bool, `Dtype`, ``X | None``, ``tuple[X, ...]``, ``Mapping[str, X]``, or one
            each of a scalar, a tuple and a mapping.
        path: setting that the value is for.
        where: place named in errors.

    Raises:
        ConfigError: the node holds something else.
    """
    kinds, optional = _without_none(annotation)
    annotation = _fitting(kinds, node)
    if node is None or _tag(node) == "null":
        if optional:
            return None
        raise _wrong(node, annotation, path, where, "Remove the key to keep the default")
    origin = typing.get_origin(annotation)
    if origin is tuple:
        element = typing.get_args(annotation)[0]
        if not isinstance(node, yaml.SequenceNode):
            hint = None
            if isinstance(node, yaml.ScalarNode):
                hint = f"Write `[{', '.join(part.strip() for part in node.value.split(','))}]`"
            raise _wrong(node, annotation, path, where, hint)
        return tuple(convert(item, element, path, where) for item in node.value)
    if origin is not None and issubclass(origin, Mapping):
        element = typing.get_args(annotation)[1]
        scalar_keys = isinstance(node, yaml.MappingNode) and all(
            hasattr(k.value, "strip") for k, _ in node.value
        )
        if not scalar_keys:
            raise _wrong(node, annotation, path, where, None)
        keys = [key.value for key, _ in node.value]
        if len(set(keys)) < len(keys):
            raise ConfigError(
                explain(f"Bad setting `{path}`", expected="each key once", got=keys, where=where)
            )
        return {
            key: convert(value, element, f"{path}.{key}", where)
            for key, (_, value) in zip(keys, node.value, strict=True)
        }
    if not isinstance(node, yaml.ScalarNode):
        raise _wrong(node, annotation, path, where, None)
    return _scalar(node, annotation, path, where)


def describe(annotation: Any) -> str:
    """Return a type in words."""
    kinds, optional = _without_none(annotation)
    if len(kinds) > 1:
        return ", ".join(describe(kind) for kind in kinds[:-1]) + f" or {describe(kinds[-1])}"
    annotation = kinds[0]
    origin = typing.get_origin(annotation)
    if annotation is Dtype:
        words = " or ".join(DTYPE_NAMES)
    elif origin is tuple:
        words = f"a list, each {describe(typing.get_args(annotation)[0])}"
    elif origin is not None:
        words = f"a mapping to {describe(typing.get_args(annotation)[1])}"
    else:
        words = NAMES[annotation]
    return f"{words} or null" if optional else words


def _scalar(node: yaml.ScalarNode, annotation: Any, path: str, where: str) -> Any:
    text, tag = node.value, _tag(node)
    quoted = node.style in ("'", '"')
    if annotation is Dtype:
        if text not in DTYPE_NAMES:
            raise _wrong(node, annotation, path, where, None)
        return named_dtypes()[text]
    if annotation is str:
        if tag == "bool":
            raise _wrong(node, annotation, path, where, f"Quote it if the text `{text}` is meant: `'{text}'`")
        if tag not in TEXT_TAGS:
            raise _wrong(node, annotation, path, where, None)
        return text
    if annotation is bool:
        if tag != "bool":
            raise _wrong(node, annotation, path, where, None)
        return bool(yaml.SafeLoader.bool_values[text.lower()])
    if quoted:
        raise _wrong(node, annotation, path, where, "Remove the quotes: they make it text")
    if annotation is int:
        if not INTEGER.fullmatch(text):
            octal = re.fullmatch(r"[-+]?0[0-7]+", text)
            hint = "Remove the leading zero: YAML reads it as octal" if octal else None
            raise _wrong(node, annotation, path, where, hint)
        if len(text) > LONGEST_NUMBER:
            raise _wrong(node, annotation, path, where, "No setting is that large")
        return int(text)
    if not NUMBER.fullmatch(text) or not math.isfinite(float(text)):
        raise _wrong(node, annotation, path, where, None)
    return float(text)


def _without_none(annotation: Any) -> tuple[list[Any], bool]:
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union):
        return [annotation], False
    kinds = list(typing.get_args(annotation))
    return [kind for kind in kinds if kind is not types.NoneType], types.NoneType in kinds


def _fitting(kinds: list[Any], node: yaml.Node | None) -> Any:
    """Return the one of several types that has the node's form, else the first."""
    for kind in kinds:
        origin = typing.get_origin(kind)
        if isinstance(node, yaml.SequenceNode) and origin is tuple:
            return kind
        if isinstance(node, yaml.MappingNode) and origin not in (None, tuple):
            return kind
    return kinds[0]


def _tag(node: yaml.Node) -> str:
    return str(node.tag).removeprefix(TAG)


def _wrong(node: yaml.Node | None, annotation: Any, path: str, where: str, hint: str | None) -> ConfigError:
    if node is None or _tag(node) == "null":
        got = "nothing"
    elif isinstance(node, yaml.ScalarNode):
        kinds = {"str": "text", "bool": "true/false", "int": "number", "float": "number"}
        got = f"`{node.value:.200}` ({kinds.get(_tag(node), _tag(node))})"
    else:
        got = "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
    return ConfigError(
        explain(f"Bad setting `{path}`", expected=describe(annotation), got=got, where=where, next_step=hint)
    )
