"""Dtype policy: one autocast region per visit, one attention backend per run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["attention_backend", "compute_region"]


def attention_backend(device: torch.device, compute_dtype: torch.dtype, *, masked: bool) -> SDPBackend:
    """Return the scaled-dot-product backend that a run pins.

    Flash attention has a deterministic backward and runs in 16 bits without a mask; everything else takes the
    math backend, which is deterministic everywhere. On the CPU the math backend is pinned as well: its flash kernel
    picks block sizes by the number of threads.
    """
    if device.type == "cuda" and compute_dtype == torch.bfloat16 and not masked:
        return SDPBackend.FLASH_ATTENTION
    return SDPBackend.MATH


@contextlib.contextmanager
def compute_region(device: torch.device, compute_dtype: torch.dtype, *, masked: bool) -> Iterator[None]:
    """Run block products in ``compute_dtype`` with the pinned attention backend.

    The weight cache of autocast is off: it would keep casts of adapter weights across visits, whose static region
    holds another block by then.
    """
    with (
        torch.autocast(
            device.type, dtype=torch.bfloat16, enabled=compute_dtype == torch.bfloat16, cache_enabled=False
        ),
        sdpa_kernel(attention_backend(device, compute_dtype, masked=masked)),
    ):
        yield
