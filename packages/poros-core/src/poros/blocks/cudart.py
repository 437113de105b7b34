"""The few CUDA runtime calls that torch does not wrap with errors: page-locking and clearing the last error."""

from __future__ import annotations

import ctypes
import functools

import torch

__all__ = ["clear_last_error", "register_host_memory", "unregister_host_memory"]

CUDA_SUCCESS = 0


@functools.cache
def _loaded_runtime() -> ctypes.CDLL | None:
    """Find the libcudart that torch loaded; opening another copy would have its own error state."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split()[-1] for line in maps if "libcudart" in line}
    except OSError:
        return None
    return ctypes.CDLL(sorted(paths)[0]) if paths else None


def clear_last_error() -> None:
    """Clear a non-sticky error, then launch a probe kernel so that a poisoned context shows here and not later.

    `torch.cuda.cudart()` returns error codes without raising and offers no ``cudaGetLastError``: without this a
    failed page-lock makes the *next* launch report "out of memory".
    """
    runtime = _loaded_runtime()
    if runtime is not None:
        runtime.cudaGetLastError()
    torch.zeros(64, device="cuda").add_(1)
    torch.cuda.synchronize()


def register_host_memory(address: int, num_bytes: int) -> int:
    """Page-lock ``num_bytes`` at ``address`` (page-aligned). Returns the CUDA error code, 0 on success."""
    code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
    if code != CUDA_SUCCESS:
        clear_last_error()
    return code


def unregister_host_memory(address: int) -> None:
    """Undo `register_host_memory`."""
    if int(torch.cuda.cudart().cudaHostUnregister(address)) != CUDA_SUCCESS:
        clear_last_error()
