"""The plugin that registers the built-in weight formats."""

from __future__ import annotations

from collections.abc import Sequence

from poros import hookimpl
from poros.interfaces import WeightFormat
from poros_quant.bf16 import Bf16Bitwise
from poros_quant.nf4 import Nf4

__all__ = ["poros_register_weight_formats"]


@hookimpl
def poros_register_weight_formats() -> Sequence[type[WeightFormat]]:
    """Register ``nf4`` and ``bf16_bitwise``."""
    return (Nf4, Bf16Bitwise)
