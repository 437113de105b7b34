"""Runs on a CUDA device to which page locks or device memory are refused: the same bits, or a refusal."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import poros
from poros.blocks import cudart
from poros.checkpoint import load_run_state, newest_complete
from poros.errors import BudgetError

pytestmark = pytest.mark.gpu

Make = Callable[..., poros.Trainer]
STREAMED = poros.Plan(num_slots=2)
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
MB = 2**20
# What the other process leaves free. A context is there already; the tiny run needs less.
HEADROOM_BYTES = 200 * MB
# Takes device memory until only so much is free, says so, and waits to be ended.
HOG = """
import sys, torch
wanted = int(sys.argv[1])
held = [torch.zeros(1, device="cuda")]
while (free := torch.cuda.mem_get_info()[0]) > wanted + 2**20:
    held.append(torch.empty(max(2**20, min(free - wanted, 2**32) // 2**20 * 2**20), dtype=torch.uint8, device="cuda"))
print("full", flush=True)
sys.stdin.read()
"""


def state(make_trainer: Make, output: Path, **settings: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    with make_trainer(output, device="cuda", **settings) as trainer:
        assert trainer.run().steps == 12
    path, _ = newest_complete(output)
    assert path is not None
    return dict(load_run_state(path).tensors)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


@contextlib.contextmanager
def another_process_leaves(num_bytes: int) -> Iterator[None]:
    torch.zeros(1, device="cuda")  # our own context comes first
    torch.cuda.empty_cache()
    hog = subprocess.Popen(
        [sys.executable, "-c", HOG, str(num_bytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert hog.stdin is not None
    assert hog.stdout is not None
    try:
        assert hog.stdout.readline() == "full\n"
        yield
    finally:
        hog.stdin.close()
        hog.wait(timeout=60)
        hog.stdout.close()


@pytest.mark.parametrize("allowed", [0, 1])
def test_page_locks_that_are_refused_after_some_bytes_change_no_bit(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    expected = state(make_trainer, tmp_path / "pinned", plan=STREAMED)
    register, taken = cudart.register_host_memory, []

    def limited(address: int, num_bytes: int) -> int:
        if len(taken) == allowed:
            return OUT_OF_MEMORY
        taken.append(num_bytes)
        return register(address, num_bytes)

    monkeypatch.setattr(cudart, "register_host_memory", limited)
    with pytest.warns(RuntimeWarning, match="Page-locking host memory stopped after"):
        found = state(make_trainer, tmp_path / "refused", plan=STREAMED)
    assert len(taken) == allowed
    assert equal(found, expected)


@pytest.mark.filterwarnings("ignore:Page-locking host memory stopped:RuntimeWarning")
def test_a_tight_limit_on_lockable_memory_changes_no_bit(make_trainer: Make, tmp_path: Path) -> None:
    expected = state(make_trainer, tmp_path / "free", plan=STREAMED)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 * 1024, hard))
    try:
        found = state(make_trainer, tmp_path / "tight", plan=STREAMED)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    assert equal(found, expected)


def test_a_card_that_another_process_fills_up_to_200_mb_trains_with_the_same_bits(
    make_trainer: Make, tmp_path: Path
) -> None:
    expected = state(make_trainer, tmp_path / "free", plan=STREAMED)
    with another_process_leaves(HEADROOM_BYTES):
        found = state(make_trainer, tmp_path / "crowded", plan=STREAMED)
    assert equal(found, expected)


def test_a_full_card_is_refused_with_the_terms_and_trains_once_there_is_room(
    make_trainer: Make, tmp_path: Path
) -> None:
    with another_process_leaves(0), pytest.raises(BudgetError):
        state(make_trainer, tmp_path / "full", plan=STREAMED)
    assert state(make_trainer, tmp_path / "full", plan=STREAMED, overwrite=True)
