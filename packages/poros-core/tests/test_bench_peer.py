"""The resident peer of the bench trains on a CPU as it would on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "validation" / "bench"
sys.path.insert(0, str(BENCH))

import cases  # noqa: E402
import peer_common  # noqa: E402
import peer_peft  # noqa: E402
import poros_rows  # noqa: E402


# Transformers 5.24 renamed the method; the GPU machine has 5.17, which knows the old name only.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_the_peer_takes_whole_steps_with_quantized_weights_and_float32_adapters() -> None:
    (row,) = cases.choose(["tiny:*peft*"])
    with poros_rows.ConfigFolders() as folders:
        values = poros_rows.line(row, folders.folder(row), device="cpu", steps=1)
        result = peer_common.measure_peer({**values, "warmup_steps": 0}, peer_peft.build)
    assert result["tokens_per_step"] == 32
    assert result["trained_dtype"] == "torch.float32"
    # Rank 16 on seven linear layers of four blocks: (in + out) * 16 each.
    shapes = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)]
    assert result["trained_parameters"] == 4 * 16 * sum(a + b for a, b in shapes)
