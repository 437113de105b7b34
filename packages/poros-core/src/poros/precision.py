"""Dtype policy: one autocast region per visit, one attention backend per run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["attention_backend", "compute_region", "widened"]


# The largest head that PyTorch's flash kernel takes.
MAX_FLASH_HEAD_DIM = 256


def attention_backend(
    device: torch.device, compute_dtype: torch.dtype, *, masked: bool, head_dim: int
) -> SDPBackend:
    """Return the scaled-dot-product backend that a run pins for blocks of one kind.

    Flash attention has a deterministic backward and runs in 16 bits without a mask; everything else takes the
    math backend, which is deterministic everywhere. On the CPU the math backend is pinned as well: its flash kernel
    picks block sizes by the number of threads.
    """
    fits_flash = compute_dtype == torch.bfloat16 and not masked and head_dim <= MAX_FLASH_HEAD_DIM
    if device.type == "cuda" and fits_flash:
        return SDPBackend.FLASH_ATTENTION
    return SDPBackend.MATH


def widened(tensor: torch.Tensor, compute_dtype: torch.dtype) -> torch.Tensor:
    """Return a frozen tensor as a layer reads it: in the compute dtype where that holds every value of its own.

    A layer may cast its input to the dtype of such a tensor (Qwen3.5's convolution does) and would then compute in the
    storage dtype.
    """
    if tensor.is_floating_point() and torch.promote_types(tensor.dtype, compute_dtype) == compute_dtype:
        return tensor.to(compute_dtype)
    return tensor


@contextlib.contextmanager
def compute_region(
    device: torch.device, compute_dtype: torch.dtype, *, masked: bool, head_dim: int
) -> Iterator[None]:
    """Run block products in ``compute_dtype`` with the pinned attention backend.

    The weight cache of autocast is off: it would keep casts of adapter weights across visits, whose static region
    holds another block by then.
    """
    with (
        torch.autocast(
            device.type, dtype=torch.bfloat16, enabled=compute_dtype == torch.bfloat16, cache_enabled=False
        ),
        sdpa_kernel(attention_backend(device, compute_dtype, masked=masked, head_dim=head_dim)),
    ):
        yield
