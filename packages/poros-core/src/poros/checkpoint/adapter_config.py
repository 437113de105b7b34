"""The fields of a PEFT config that decide ranks and scalings, checked: PEFT takes whatever the JSON holds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poros.errors import CheckpointError, explain

if TYPE_CHECKING:
    from peft import LoraConfig

__all__ = ["check_lora_fields"]

# A pattern is matched against every layer's name: one that repeats a group, or repeats often, can take for ever.
REPEATED_GROUP = re.compile(r"\)\s*[*+{]")
REPEAT = re.compile(r"(?<!\\)[*+{]")
MAX_REPEATS = 3
MAX_PATTERN_CHARACTERS = 500


def check_lora_fields(config: LoraConfig, path: Path) -> None:
    """Check rank, alpha, their patterns and the name of the base.

    Raises:
        CheckpointError: a field holds what PEFT would compute nonsense from, or fail on later.
    """
    _require(_is_rank(config.r), path, "r", "a positive integer", config.r)
    _require(_is_alpha(config.lora_alpha), path, "lora_alpha", "a finite number", config.lora_alpha)
    _require(isinstance(config.use_rslora, bool), path, "use_rslora", "true or false", config.use_rslora)
    base: Any = config.base_model_name_or_path
    _require(base is None or isinstance(base, str), path, "base_model_name_or_path", "a text", base)
    patterns: tuple[tuple[str, Callable[[Any], bool]], ...] = (
        ("rank_pattern", _is_rank),
        ("alpha_pattern", _is_alpha),
    )
    for field, is_value in patterns:
        found: Any = getattr(config, field)
        good = isinstance(found, dict) and all(_is_pattern(key) and is_value(v) for key, v in found.items())
        _require(good, path, field, "plain patterns with their numbers", found)


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**63 and math.isfinite(value)


def _is_pattern(text: Any) -> bool:
    if not isinstance(text, str) or len(text) > MAX_PATTERN_CHARACTERS:
        return False
    if REPEATED_GROUP.search(text) or len(REPEAT.findall(text)) > MAX_REPEATS:
        return False
    try:
        re.compile(rf".*\.({text})$")
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _require(good: bool, path: Path, field: str, expected: str, got: object) -> None:
    if not good:
        raise CheckpointError(
            explain(
                f"Cannot use the adapter's `{field}`", expected=expected, got=f"{got!r:.80}", where=str(path)
            )
        )
