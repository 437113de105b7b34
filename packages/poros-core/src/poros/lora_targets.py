"""Which linear layers of the blocks LoRA adapts: chosen and checked."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection

from peft.utils.other import get_pattern_key
from torch import nn

from poros.errors import ConfigError, explain
from poros.interfaces import ModelParts
from poros.settings import LoraSettings

__all__ = ["ALL_LINEAR", "resolve_targets"]

# PEFT's own word for every linear layer. Here: of the text model's blocks.
ALL_LINEAR = "all-linear"


def resolve_targets(
    model: nn.Module,
    parts: ModelParts,
    lora: LoraSettings,
    defaults: Collection[str],
    outer_linears: Callable[[], Collection[str]],
) -> tuple[str, ...]:
    """Return the leaf names that are adapted: the user's, or those of the family's defaults that the blocks have.

    Args:
        model: the text model, not yet injected.
        defaults: the architecture's default targets.
        outer_linears: returns the paths of linear layers outside the text model (vision and audio towers).

    Raises:
        ConfigError: a target is the head or the embedding, reaches a tower, or matches nothing; the leaf names that
            exist are listed. A block does not exist. A rank or alpha pattern is no regular expression or matches
            nothing.
    """
    linears = _linears(model, parts, lora)
    leaves = sorted({_leaf(name) for name in linears})
    if lora.targets is None:
        targets = tuple(target for target in defaults if target in leaves)
        if not targets:
            raise _matches_nothing(", ".join(defaults), leaves)
    elif tuple(lora.targets) == (ALL_LINEAR,):
        targets = tuple(leaves)
    else:
        targets = tuple(lora.targets)
        for target in targets:
            _check_target(target, leaves, parts, outer_linears)
    adapted = [f"{parts.blocks}.{name}" for name in linears if _leaf(name) in targets]
    for setting in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(lora, setting):
            _check_pattern(pattern, adapted, setting)
    return targets


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _linears(model: nn.Module, parts: ModelParts, lora: LoraSettings) -> list[str]:
    """Return the paths below the blocks of every linear layer of a block that may be adapted."""
    blocks = model.get_submodule(parts.blocks)
    num_blocks = len(blocks)  # type: ignore[arg-type]
    if lora.blocks is not None and (bad := [b for b in lora.blocks if not 0 <= b < num_blocks]):
        raise ConfigError(
            explain(
                "LoRA on a block that does not exist",
                expected=f"0 to {num_blocks - 1}",
                got=bad,
                where="lora.blocks",
            )
        )
    return [
        name
        for name, module in blocks.named_modules()
        if isinstance(module, nn.Linear)
        and (lora.blocks is None or int(name.partition(".")[0]) in lora.blocks)
    ]


def _check_target(
    target: str, leaves: list[str], parts: ModelParts, outer_linears: Callable[[], Collection[str]]
) -> None:
    if target in (_leaf(parts.head), _leaf(parts.embedding)):
        raise ConfigError(
            explain(
                "LoRA on the vocabulary matrices is not offered",
                expected=f"targets among {leaves}",
                got=f"`{target}`",
                where="lora.targets",
                next_step="Remove it: head and embedding stay frozen (they may be tied, and are never streamed "
                "with adapters)",
            )
        )
    if target in leaves:
        return
    if reached := next((path for path in outer_linears() if _reaches(target, path)), None):
        raise ConfigError(
            explain(
                "A LoRA target reaches outside the text model",
                expected=f"leaf names of the text model's blocks among {leaves}",
                got=f"`{target}`, which matches `{reached}`",
                where="lora.targets",
                next_step="Name leaves only: vision and audio towers stay as they are and are not loaded",
            )
        )
    raise _matches_nothing(target, leaves)


def _reaches(target: str, path: str) -> bool:
    """Whether PEFT would adapt the layer at ``path``: by suffix, or by a regular expression of the whole path."""
    if path == target or path.endswith(f".{target}"):
        return True
    try:
        return re.fullmatch(target, path) is not None
    except re.error:
        return False


def _matches_nothing(target: str, leaves: list[str]) -> ConfigError:
    near = difflib.get_close_matches(target, leaves, n=1)
    return ConfigError(
        explain(
            "A LoRA target matches no module",
            expected=f"leaf names among {leaves}, or `{ALL_LINEAR}`",
            got=f"`{target}`",
            where="lora.targets",
            next_step=f"Did you mean `{near[0]}`?" if near else "Correct `lora.targets`",
        )
    )


def _check_pattern(pattern: str, adapted: list[str], setting: str) -> None:
    """Refuse a pattern that PEFT would match with no adapted module: it would change nothing, in silence."""
    try:
        matches = any(get_pattern_key([pattern], name) == pattern for name in adapted)
    except re.error as error:
        raise ConfigError(
            explain(
                "Bad LoRA pattern",
                expected="a regular expression",
                got=f"`{pattern}` ({error})",
                where=f"lora.{setting}",
            )
        ) from error
    if not matches:
        raise ConfigError(
            explain(
                "A LoRA pattern matches no adapted module",
                expected=f"the end of a module's path such as `{adapted[0]}`",
                got=f"`{pattern}`",
                where=f"lora.{setting}",
                next_step=f"Correct `lora.{setting}`, or adapt that module in `lora.targets` and `lora.blocks`",
            )
        )
