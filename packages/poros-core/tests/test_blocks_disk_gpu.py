"""The disk tier on a CUDA device: pinned ring, copies that lag behind the reads, and what must be caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from poros.blocks.disk_ring import DiskRead
from poros.blocks.slots import CudaSlots
from poros.blocks.store_cache import StoreCache
from poros.determinism import configure
from poros.errors import CheckpointError
from poros.interfaces import ParityCase
from poros.parity.case_run import CaseRun, start_case
from poros.parity.compare import compare
from poros.parity.faults import delayed_copies, poison_before_refill
from poros.parity.stream_faults import delayed_compute, foreign_traffic
from poros.parity.trajectory import Trajectory
from poros.plugins import Registry
from poros.settings import Plan

pytestmark = pytest.mark.gpu

ON_DISK = Plan(num_slots=2, disk_blocks=10**6)
Start = Callable[..., CaseRun]
# Blocks large enough that a copy takes longer than a read of cached pages begins.
HIDDEN, LAYERS = 1024, 8


def _blocks() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=512,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )


CASE = ParityCase(
    name="disk-blocks",
    architecture="qwen2",
    make_config=_blocks,
    row_lengths=((64, 40), (64,)),
    lora={"rank": 4, "dropout": 0.1},
    num_steps=2,
    length_bucket=64,
)


@pytest.fixture(scope="module")
def cuda() -> torch.device:
    device = torch.device("cuda")
    configure(device)
    return device


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests: the first one fills it."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def oracle(registry: Registry, cuda: torch.device) -> Trajectory:
    """The truly resident run."""
    run = start_case(CASE, Plan(residency="resident"), registry, cuda)
    try:
        return run.train(2)
    finally:
        run.close()


@pytest.fixture
def start(registry: Registry, cuda: torch.device, folder: Path) -> Iterator[Start]:
    """Start the case from the disk; every run is closed at the end."""
    runs: list[CaseRun] = []

    def make(plan: Plan = ON_DISK, where: Path = folder, make_engine: Any = None) -> CaseRun:
        runs.append(start_case(CASE, plan, registry, cuda, cache=StoreCache(where), make_engine=make_engine))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


@pytest.mark.parametrize(
    "plan",
    [
        ON_DISK,
        replace(ON_DISK, graphs=False),
        Plan(num_slots=3, disk_blocks=3, resident_blocks=2, workspace=True, head="host"),
        Plan(num_slots=6, disk_blocks=5, activations="host", pin_host_memory=False),
    ],
    ids=["all", "eager", "three tiers", "host pageable"],
)
def test_blocks_from_the_disk_change_no_bit(plan: Plan, start: Start, oracle: Trajectory) -> None:
    run = start(plan)
    verdict = compare(oracle, run.train(2))
    assert verdict.outcome == "equal", verdict.detail
    assert run.engine.take_statistics().disk_bytes > 0


def test_the_ring_is_page_locked(start: Start) -> None:
    slots = start().engine.slots
    assert slots is not None
    assert slots.ring is not None
    assert all(slots.ring._arena.pinned)


@pytest.mark.parametrize(
    "make_engine",
    [delayed_copies, delayed_compute, foreign_traffic, poison_before_refill],
    ids=["late copies", "late compute", "traffic", "poisoned"],
)
def test_unfavourable_timing_changes_no_bit(make_engine: Any, start: Start, oracle: Trajectory) -> None:
    verdict = compare(oracle, start(make_engine=make_engine).train(2))
    assert verdict.outcome == "equal", verdict.detail


def test_a_buffer_that_is_given_back_before_its_copy_has_read_it_is_caught(
    start: Start, oracle: Trajectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: copies sleep, and their buffers take the next reads meanwhile."""
    copy = CudaSlots._copy

    def sleepy(self: CudaSlots, block: int, source: torch.Tensor, slot: int) -> None:
        with torch.cuda.stream(self.copy_stream):
            torch.cuda._sleep(100_000_000)
        copy(self, block, source, slot)

    def hasty(self: CudaSlots, slot: int, read: DiskRead) -> None:
        assert self.ring is not None
        self.ring.give_back(read)

    monkeypatch.setattr(CudaSlots, "_copy", sleepy)
    assert compare(oracle, start().train(2)).outcome == "equal"  # the delay alone
    monkeypatch.setattr(CudaSlots, "_copy_issued", hasty)
    assert compare(oracle, start().train(2)).outcome == "different"


def test_a_flipped_bit_stops_the_run_and_the_next_one_is_right(
    start: Start, oracle: Trajectory, tmp_path: Path
) -> None:
    run = start(where=tmp_path)
    (path,) = tmp_path.glob("*/block-00004.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=r"cached block changed: .*block-00004"):
        run.train(1)
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    assert compare(oracle, run.train(2)).outcome == "equal"


def test_a_whole_pass_leaves_every_buffer_free(start: Start) -> None:
    run = start()
    run.train(2)
    slots = run.engine.slots
    assert slots is not None
    assert slots.ring is not None
    slots.drain()
    assert sorted(slots.ring._free) == list(range(len(slots.ring._free)))
    assert len(slots.ring._free) == len(slots.ring._arena.pinned)
