"""Weight formats for Poros."""

from poros_quant.bf16 import Bf16Bitwise
from poros_quant.nf4 import Nf4

__all__ = ["Bf16Bitwise", "Nf4"]
