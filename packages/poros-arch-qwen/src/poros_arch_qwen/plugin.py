"""The plugin that registers the Qwen architectures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from poros import hookimpl

if TYPE_CHECKING:
    from poros.interfaces import Architecture, ParityCase

__all__ = ["poros_register_architectures", "poros_register_parity_cases"]


@hookimpl
def poros_register_architectures() -> Sequence[type[Architecture]]:
    """Register ``qwen2``, ``qwen3`` and ``qwen3_5``."""
    from poros_arch_qwen.architectures import Qwen2, Qwen3, Qwen3_5

    return (Qwen2, Qwen3, Qwen3_5)


@hookimpl
def poros_register_parity_cases() -> Sequence[ParityCase]:
    """Register the tiny models that gate the architectures."""
    from poros_arch_qwen.parity_cases import PARITY_CASES

    return PARITY_CASES
