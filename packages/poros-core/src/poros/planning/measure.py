"""Short measurements of a machine's rates; everything they allocate is given back."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import torch

from poros.adapters import base_linears
from poros.blocks.host_memory import HostArena
from poros.blocks.kinds import BlockKind
from poros.clock import Stopwatch
from poros.planning.rates import Rates

__all__ = ["measure_rates", "measuring_bytes"]

# Large enough that starting a kernel does not count, small enough for a card with little room.
CUDA_COPY_BYTES = 256 * 2**20
CUDA_MATRIX = 8192
CUDA_ROWS = 4096
CPU_COPY_BYTES = 16 * 2**20
CPU_MATRIX = 256
CPU_ROWS = 128
REPEATS = 3
TINY_KERNELS = 256
# Of a format whose stored bytes already are the matrix, nothing is dequantized; a copy would take this.
BYTES_PER_COPIED_WEIGHT = 4
TINY_ELEMENTS = 1024
# Shorter than anything that is timed here.
LEAST_SECONDS = 1e-9

Work = Callable[[], object]
Clock = Callable[[Work], float]


def measuring_bytes(device: torch.device) -> int:
    """Return how much host memory `measure_rates` takes for a moment; on the CPU both ends of a copy lie there."""
    return CUDA_COPY_BYTES if device.type == "cuda" else 2 * CPU_COPY_BYTES


def measure_rates(device: torch.device, compute_dtype: torch.dtype, kind: BlockKind) -> Rates:
    """Measure link, products, dequantization, memory and launches, each in a few short rounds.

    Args:
        device: where the run computes.
        compute_dtype: of its products.
        kind: the block whose format is dequantized.

    Memory:
        On CUDA below 1 GB of device memory for a moment, and 256 MiB of pinned host memory.
    """
    cuda = device.type == "cuda"
    clock = functools.partial(_best_seconds, device)
    link, back, memory = _copies(clock, device)
    launch, kernel = _launches(clock, device)
    rates = Rates(
        origin=f"measured on {torch.cuda.get_device_name(device) if cuda else 'this CPU'}",
        measured=True,
        link_bytes_per_second=link,
        return_bytes_per_second=back,
        matmul_flops_per_second=_matmul(clock, device, compute_dtype),
        dequantized_weights_per_second=_dequantized(clock, kind, device) or memory / BYTES_PER_COPIED_WEIGHT,
        memory_bytes_per_second=memory,
        kernel_seconds=kernel,
        launch_seconds=launch,
    )
    if cuda:
        torch.cuda.empty_cache()
    return rates


def _best_seconds(device: torch.device, work: Work) -> float:
    """Return the shortest of a few timings, after one that is not counted."""
    seconds = []
    for _ in range(REPEATS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        watch = Stopwatch()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(watch.seconds)
    # A clock that went backwards measures nothing, and is no reason to divide by zero.
    return max(min(seconds[1:]), LEAST_SECONDS)


def _matmul(clock: Clock, device: torch.device, dtype: torch.dtype) -> float:
    size, rows = (CUDA_MATRIX, CUDA_ROWS) if device.type == "cuda" else (CPU_MATRIX, CPU_ROWS)
    matrix = torch.zeros(size, size, dtype=dtype, device=device)
    inputs = torch.zeros(rows, size, dtype=dtype, device=device)
    output = torch.empty(rows, size, dtype=dtype, device=device)
    return 2 * rows * size * size / clock(lambda: torch.mm(inputs, matrix, out=output))


def _copies(clock: Clock, device: torch.device) -> tuple[float, float, float]:
    """Return bytes per second to the device, back, and through its own memory."""
    cuda = device.type == "cuda"
    count = CUDA_COPY_BYTES if cuda else CPU_COPY_BYTES
    there = torch.zeros(count, dtype=torch.uint8, device=device)
    memory = 2 * count / clock(lambda: there.bitwise_not_())
    arena = HostArena([count], pin=cuda)
    try:
        here = arena.region(0)
        link = count / clock(lambda: there.copy_(here, non_blocking=True))
        back = count / clock(lambda: here.copy_(there, non_blocking=True))
    finally:
        arena.close()
    return link, back, memory


def _dequantized(clock: Clock, kind: BlockKind, device: torch.device) -> float:
    """Time the dequantization of the largest matrix, of zeros: any bytes take as long. 0.0 where none is needed."""
    linears = [(path, linear) for path, linear in base_linears(kind.prototype) if linear.needs_dequantize]
    if not linears:
        return 0.0
    path, largest = max(linears, key=lambda item: item[1].in_features * item[1].out_features)
    prefix = f"{path}."
    entries = [entry for entry in kind.layout.entries if entry.spec.name.startswith(prefix)]
    views = {
        entry.spec.name.removeprefix(prefix): torch.zeros(
            entry.spec.shape, dtype=entry.spec.dtype, device=device
        )
        for entry in entries
    }
    linear = copy.deepcopy(largest)
    linear.bind(views)
    target = torch.empty(linear.out_features, linear.in_features, dtype=linear.compute_dtype, device=device)
    return target.numel() / clock(lambda: linear.dequantize(out=target))


def _launches(clock: Clock, device: torch.device) -> tuple[float, float]:
    """Return the seconds of one small operation launched by itself, and of one inside a graph."""
    tiny = torch.zeros(TINY_ELEMENTS, device=device)

    def many() -> None:
        for _ in range(TINY_KERNELS):
            tiny.add_(1.0)

    launch = clock(many) / TINY_KERNELS
    if device.type != "cuda":
        return launch, launch
    many()  # nothing may be used for the first time inside a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        many()
    kernel = clock(graph.replay) / TINY_KERNELS
    graph.reset()
    return launch, kernel
