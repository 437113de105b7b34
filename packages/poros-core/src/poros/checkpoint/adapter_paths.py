"""Rewriting an adapter for another model class: the same text blocks, kept under another path."""

from __future__ import annotations

import re
from pathlib import Path

from poros.checkpoint.adapter_files import load_adapter, save_adapter
from poros.errors import CheckpointError, explain

__all__ = ["move_adapter"]

KEY_PREFIX = "base_model.model."


def move_adapter(source: Path, target: Path, *, old: str, new: str) -> Path:
    """Write ``source`` with its blocks under another path to ``target`` and return that.

    An adapter trained on a wrapper's text tower so fits the text-only class, or the other way round.

    Args:
        source: an adapter folder; it is not changed.
        target: where the new folder will appear.
        old: where the class that it was saved for keeps its blocks, such as ``model.language_model.layers``.
        new: where the other class keeps them, such as ``model.layers``.

    Raises:
        CheckpointError: the adapter cannot be read, or a key lies elsewhere than under ``old``.
        OutputError: ``target`` exists or cannot be written.
    """
    config, tensors = load_adapter(source)
    prefix = f"{KEY_PREFIX}{old}."
    if strange := next((name for name in tensors if not name.startswith(prefix)), None):
        raise CheckpointError(
            explain(
                "Cannot move an adapter",
                expected=f"every key under `{prefix}`",
                got=f"`{strange}`",
                where=str(source),
                next_step="Give the path that its own keys have as `old`",
            )
        )
    if isinstance(config.target_modules, str):
        config.target_modules = config.target_modules.replace(re.escape(old), re.escape(new))
    moved = {f"{KEY_PREFIX}{new}.{name.removeprefix(prefix)}": tensor for name, tensor in tensors.items()}
    return save_adapter(target, moved, config, config.base_model_name_or_path or "", made_for={"blocks": new})
