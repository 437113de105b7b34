"""How fast a machine moves and computes: the few numbers that step times are predicted from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

__all__ = ["ASSUMED_DISK_BYTES_PER_SECOND", "ASSUMED_RATES", "Rates", "assumed_rates"]

# ASSUMED: a solid-state drive behind PCIe 4, read sequentially. Measured where a plan reads from the disk.
ASSUMED_DISK_BYTES_PER_SECOND = 3e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Rates of one device and its link.

    Attributes:
        origin: where the numbers come from, in words.
        measured: they were measured on the machine at hand.
        link_bytes_per_second: pinned host memory to the device.
        return_bytes_per_second: the other direction.
        matmul_flops_per_second: large products in the compute dtype.
        dequantized_weights_per_second: weights of the format that become matrix elements.
        memory_bytes_per_second: read and written by elementwise kernels, counted together.
        kernel_seconds: the shortest time between two kernels of a graph; on the CPU, of an operation.
        launch_seconds: host time of one operation that is launched by itself.
        disk_bytes_per_second: of the folder that blocks are streamed from.
        disk_measured: it was measured there; otherwise it is `ASSUMED_DISK_BYTES_PER_SECOND`.
    """

    origin: str
    measured: bool
    link_bytes_per_second: float
    return_bytes_per_second: float
    matmul_flops_per_second: float
    dequantized_weights_per_second: float
    memory_bytes_per_second: float
    kernel_seconds: float
    launch_seconds: float
    disk_bytes_per_second: float = ASSUMED_DISK_BYTES_PER_SECOND
    disk_measured: bool = False


# Of one H200 on PCIe 5 x16 (torch 2.11, bitsandbytes 0.50.2): the link was measured directly, 790 TFLOP/s is what its
# arithmetic was timed at; the others are solved from the compute floors of a 7B and a 32B block at 512 and 4096 tokens
# (3.0 and 14.3 ms, 5.25 and 25.0 ms a block), which they reproduce within 10 %. A launch is what eager steps took,
# 14 ms a block and micro-batch, divided by its operations.
ASSUMED_RATES = Rates(
    origin="ASSUMED: what was measured on one H200 with PCIe 5 x16; another card differs",
    measured=False,
    link_bytes_per_second=55.3e9,
    return_bytes_per_second=55.3e9,
    matmul_flops_per_second=790e12,
    dequantized_weights_per_second=6.1e11,
    memory_bytes_per_second=4.0e12,
    kernel_seconds=1.0e-6,
    launch_seconds=20e-6,
)
# Tensor cores do not take float32 as long as TF32 is off; the data sheet's rate of the H200.
ASSUMED_FLOAT32_FLOPS = 67e12


def assumed_rates(compute_dtype: torch.dtype) -> Rates:
    """Return `ASSUMED_RATES` for a compute dtype."""
    if compute_dtype != torch.float32:
        return ASSUMED_RATES
    return replace(ASSUMED_RATES, matmul_flops_per_second=ASSUMED_FLOAT32_FLOPS)
