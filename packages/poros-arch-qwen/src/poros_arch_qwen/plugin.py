"""The plugin that registers the Qwen architectures."""

from __future__ import annotations

from collections.abc import Sequence

from poros import hookimpl
from poros.interfaces import Architecture
from poros_arch_qwen.architectures import Qwen2, Qwen3

__all__ = ["poros_register_architectures"]


@hookimpl
def poros_register_architectures() -> Sequence[type[Architecture]]:
    """Register ``qwen2`` and ``qwen3``."""
    return (Qwen2, Qwen3)
