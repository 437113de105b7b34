"""From the setting ``quantization`` to a weight format."""

from __future__ import annotations

import difflib
import warnings

from poros.errors import FormatError, explain
from poros.interfaces import WeightFormat
from poros.plugins import Registry

__all__ = ["make_weight_format"]

# Named because it is the first thing that people coming from bitsandbytes ask for.
INT8_NAMES = ("int8", "8bit", "8-bit", "load_in_8bit")
INT8_REASON = (
    "bitsandbytes' int8 product picks outlier columns from the activations of the whole batch, so a row's result "
    "depends on the rows beside it and no gate can promise equal bits"
)


def make_weight_format(name: str, registry: Registry) -> WeightFormat:
    """Return the registered weight format ``name``; an experimental one comes with a warning.

    Raises:
        FormatError: no loaded plugin registers it. ``int8`` is named with the reason why it is not offered.
    """
    offered = sorted(registry.weight_formats)
    registered = registry.weight_formats.get(name)
    if registered is None:
        listed = ", ".join(offered) or "none"
        if name.lower() in INT8_NAMES:
            raise FormatError(
                f"Bad setting `quantization`: `{name}` is not offered: {INT8_REASON}. Offered: {listed}."
            )
        near = difflib.get_close_matches(name, offered, n=1)
        next_step = f"Did you mean `{near[0]}`?" if near else None if offered else "Run `uv add poros-quant`"
        raise FormatError(
            explain(
                "Bad setting `quantization`",
                expected=f"one of {listed}",
                got=f"`{name}`",
                next_step=next_step,
            )
        )
    weight_format = registered.value()
    if weight_format.experimental:
        claim = "" if weight_format.claims_bitwise else " and makes no claim of bitwise equality"
        warnings.warn(
            f"EXPERIMENTAL: the weight format `{name}` is experimental{claim}.", UserWarning, stacklevel=2
        )
    return weight_format
