"""In which dtype a layer reads its frozen plain tensors."""

from __future__ import annotations

import pytest
import torch

from poros.precision import widened

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("stored", "compute", "read"),
    [
        (BFLOAT16, FLOAT32, FLOAT32),
        (FLOAT32, BFLOAT16, FLOAT32),
        (BFLOAT16, BFLOAT16, BFLOAT16),
        (torch.int64, FLOAT32, torch.int64),
    ],
)
def test_plain_tensors_are_read_in_a_wider_compute_dtype_and_never_lose_precision(
    stored: torch.dtype, compute: torch.dtype, read: torch.dtype
) -> None:
    assert widened(torch.ones(3, dtype=stored), compute).dtype == read
