"""The plugin that registers the built-in weight formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from poros import hookimpl

if TYPE_CHECKING:
    from poros.interfaces import WeightFormat

__all__ = ["poros_register_weight_formats"]


@hookimpl
def poros_register_weight_formats() -> Sequence[type[WeightFormat]]:
    """Register ``nf4`` and ``bf16_bitwise``."""
    from poros_quant import Bf16Bitwise, Nf4

    return (Nf4, Bf16Bitwise)
