"""The plugin that registers the Gemma architectures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from poros import hookimpl

if TYPE_CHECKING:
    from poros.interfaces import Architecture, ParityCase

__all__ = ["poros_register_architectures", "poros_register_parity_cases"]


@hookimpl
def poros_register_architectures() -> Sequence[type[Architecture]]:
    """Register ``gemma3`` and ``gemma4``."""
    from poros_arch_gemma.architectures import Gemma3, Gemma4

    return (Gemma3, Gemma4)


@hookimpl
def poros_register_parity_cases() -> Sequence[ParityCase]:
    """Register the tiny models that gate the architectures."""
    from poros_arch_gemma.parity_cases import PARITY_CASES

    return PARITY_CASES
