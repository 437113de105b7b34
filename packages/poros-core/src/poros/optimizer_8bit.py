"""bitsandbytes' AdamW with both moments in 8 bits, over the flat bank.

A moment is a code per element and one absmax for every 256 elements. Tensors of the bank start at multiples of 256
elements, so a block never spans two of them, and the moments of padding are never a block's largest: the update has the
bits of one `AdamW8bit` per LoRA tensor with ``min_8bit_size=0``. Left at its default bitsandbytes would keep tensors
below 4096 elements in 32 bits; the bank has one tensor per group, so all of its elements are in 8 bits.

On a CPU bitsandbytes quantizes by table and turns what is near zero into about 2e-5 of the block's largest, where its
GPU kernel takes the nearest code: good for tests, coarser than the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import torch

from poros.bank import ALIGNMENT_ELEMENTS
from poros.errors import ConfigError, explain
from poros.settings import OptimizerSettings

__all__ = ["BYTES_PER_ELEMENT", "KEYS", "NAME", "make", "require"]

NAME = "adamw_8bit"
# bitsandbytes' own, not a choice of its callers.
BLOCK_ELEMENTS = 256
assert ALIGNMENT_ELEMENTS % BLOCK_ELEMENTS == 0
# A code, and a share of its block's float32 absmax.
BYTES_PER_ELEMENT = 1 + 4 / BLOCK_ELEMENTS
# What Poros calls a quantity -> its key in bitsandbytes' state. The code books are constants.
KEYS: Mapping[str, str] = {
    "exp_avg": "state1",
    "exp_avg_absmax": "absmax1",
    "exp_avg_sq": "state2",
    "exp_avg_sq_absmax": "absmax2",
}
# The kernel takes the number of elements as a 32-bit integer.
MAX_ELEMENTS = 2**31 - 1


def require() -> ModuleType:
    """Return bitsandbytes, which has kernels for CUDA and for the CPU.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        import bitsandbytes
    except Exception as error:  # a binary that does not fit this machine fails in any way
        raise _unusable(
            "a working bitsandbytes",
            f"{type(error).__name__}: {error}",
            "`uv add poros-quant` brings it and `poros doctor` examines it",
        ) from error
    return bitsandbytes


def make(groups: list[dict[str, object]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Return the optimizer of these parameter groups with its state made, so that a checkpoint may be loaded into it.

    Raises:
        ConfigError: see `require`; or a parameter has more elements than the kernel can count.
    """
    parameters = [parameter for group in groups for parameter in group["params"]]  # type: ignore[attr-defined]
    bitsandbytes = require()
    largest = max(parameter.numel() for parameter in parameters)
    if largest > MAX_ELEMENTS:
        raise _unusable(
            f"at most {MAX_ELEMENTS} elements in a group of the adapter bank",
            str(largest),
            "Use `optimizer.name: adamw`, or a lower `lora.rank`",
        )
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(
        groups,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        min_8bit_size=0,
    )
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            optimizer.init_state(group, parameter, group_index, index)  # type: ignore[attr-defined]
    return optimizer


def _unusable(expected: str, got: str, next_step: str) -> ConfigError:
    return ConfigError(
        explain(
            f"Cannot use `{NAME}`", expected=expected, got=got, where="optimizer.name", next_step=next_step
        )
    )
