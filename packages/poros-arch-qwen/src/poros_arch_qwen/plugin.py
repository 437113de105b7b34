"""The plugin that registers the Qwen architectures."""

from __future__ import annotations

from collections.abc import Sequence

from poros import hookimpl
from poros.interfaces import Architecture, ParityCase
from poros_arch_qwen.architectures import Qwen2, Qwen3

__all__ = ["poros_register_architectures", "poros_register_parity_cases"]


@hookimpl
def poros_register_architectures() -> Sequence[type[Architecture]]:
    """Register ``qwen2`` and ``qwen3``."""
    return (Qwen2, Qwen3)


@hookimpl
def poros_register_parity_cases() -> Sequence[ParityCase]:
    """Register the tiny models that gate both architectures."""
    from poros_arch_qwen.parity_cases import PARITY_CASES

    return PARITY_CASES
