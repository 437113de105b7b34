"""Weight formats for Poros. The classes are imported on first use: they bring torch and bitsandbytes along."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poros_quant.bf16 import Bf16Bitwise
    from poros_quant.nf4 import Nf4

__all__ = ["Bf16Bitwise", "Nf4"]

_HOMES = {"Bf16Bitwise": "poros_quant.bf16", "Nf4": "poros_quant.nf4"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module `poros_quant` has no attribute `{name}`")
