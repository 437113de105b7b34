"""Runs whose blocks come from the disk: the same bits, or an error that says which file."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from poros.blocks import disk_ring, store_cache
from poros.blocks.disk_ring import DiskRing
from poros.blocks.placement import PlacedStore
from poros.blocks.store_cache import StoreCache
from poros.errors import CheckpointError, ConfigError, OutputError
from poros.interfaces import ParityCase
from poros.parity.case_run import CaseRun, start_case
from poros.parity.compare import compare
from poros.parity.faults import delayed_copies, poison_before_refill
from poros.parity.trajectory import Trajectory
from poros.plugins import Registry
from poros.settings import ACCUMULATION_ORDERS, Plan

StartRun = Callable[..., CaseRun]
StartOnDisk = Callable[..., CaseRun]
ON_DISK = Plan(num_slots=2, disk_blocks=4)
LONG_ENOUGH = 30.0


@pytest.fixture
def start(
    registry: Registry, cpu: torch.device, tiny_case: ParityCase, tmp_path: Path
) -> Iterator[StartOnDisk]:
    """Start the tiny case with a cache in the test's folder; every run is closed at the end."""
    runs: list[CaseRun] = []

    def make(
        plan: Plan = ON_DISK, folder: Path = tmp_path, make_engine: Any = None, **changes: Any
    ) -> CaseRun:
        case = replace(tiny_case, compute_dtype=torch.float32, **changes)
        runs.append(start_case(case, plan, registry, cpu, cache=StoreCache(folder), make_engine=make_engine))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


@pytest.fixture
def oracle(start_run: StartRun) -> Trajectory:
    """Two steps of the truly resident run."""
    return start_run(Plan(residency="resident"), compute_dtype=torch.float32).train(2)


def block_path(folder: Path, index: int) -> Path:
    (path,) = folder.glob(f"*/block-{index:05d}.safetensors")
    return path


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    with path.open("r+b") as file:
        file.write(content)


# ---- the same bits


@pytest.mark.parametrize(
    "plan",
    [
        ON_DISK,
        Plan(num_slots=2, disk_blocks=1),
        Plan(num_slots=5, disk_blocks=2, resident_blocks=1, kept_blocks=1, workspace=True, head="host"),
        Plan(num_slots=3, disk_blocks=3, order=ACCUMULATION_ORDERS[1], activations="host"),
    ],
    ids=["all", "one", "three tiers", "micro-batch-major"],
)
def test_blocks_from_the_disk_change_no_bit(plan: Plan, start: StartOnDisk, oracle: Trajectory) -> None:
    run = start(plan)
    verdict = compare(oracle, run.train(2))
    assert verdict.outcome == "equal", verdict.detail
    assert run.engine.take_statistics().disk_bytes > 0


@pytest.mark.parametrize("make_engine", [delayed_copies, poison_before_refill], ids=["late", "poisoned"])
def test_unfavourable_timing_changes_no_bit(make_engine: Any, start: StartOnDisk, oracle: Trajectory) -> None:
    verdict = compare(oracle, start(make_engine=make_engine).train(2))
    assert verdict.outcome == "equal", verdict.detail


def test_a_disk_that_is_slower_than_everything_changes_no_bit(
    start: StartOnDisk, oracle: Trajectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv
    pause = threading.Event()

    def slow(*given: Any) -> int:
        pause.wait(0.01)
        return preadv(*given)

    monkeypatch.setattr(os, "preadv", slow)
    run = start()
    verdict = compare(oracle, run.train(2))
    assert verdict.outcome == "equal", verdict.detail
    assert run.engine.take_statistics().exposed_copy_seconds > 0.01


def test_a_store_of_an_earlier_run_is_used_and_never_held(
    start: StartOnDisk, oracle: Trajectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(Plan(num_slots=2)).close()
    monkeypatch.setattr(StoreCache, "fill", None)
    run = start()
    assert isinstance(run.model.store, PlacedStore)
    assert run.model.store._host.layouts == []
    assert compare(oracle, run.train(2)).outcome == "equal"


def test_training_goes_on_where_an_evaluation_was_aborted(start: StartOnDisk, oracle: Trajectory) -> None:
    run = start()
    run.train(1)
    visit, visits = run.engine._visit, iter(range(100))

    def failing(*given: Any) -> None:
        if next(visits) == 1:
            raise KeyboardInterrupt
        visit(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.engine, "_visit", failing)
        with pytest.raises(KeyboardInterrupt):
            run.engine.evaluate(run.micro_batches(0))
    run.engine.evaluate(run.micro_batches(0))
    assert compare(oracle, run.train(1)).outcome == "equal"


# ---- controls


class HastyRing(DiskRing):
    """Gives a buffer to the next read before its block is copied, and waits for that read."""

    def bytes(self, read: disk_ring.DiskRead) -> torch.Tensor:
        found = super().bytes(read)
        following = next(iter(self._queue), None)
        if following is not None and read.buffer is not None:
            with self._changed:
                self._free.append(read.buffer)
                self._changed.notify_all()
            assert self.wait(following, LONG_ENOUGH)
        return found


def test_a_ring_buffer_that_is_refilled_too_early_is_caught(
    start: StartOnDisk, oracle: Trajectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poros.blocks.disk_ring.RING_BUFFERS", 1)
    monkeypatch.setattr("poros.blocks.slots.DiskRing", HastyRing)
    verdict = compare(oracle, start().train(2))
    assert verdict.outcome == "different"


def test_a_read_that_is_not_waited_for_is_caught(
    start: StartOnDisk, oracle: Trajectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poros.blocks.slots.Slots._wait_for_read", lambda self, slot: None)
    monkeypatch.setattr("poros.blocks.slots.Slots._copy_what_was_read", lambda self: None)
    assert compare(oracle, start().train(2)).outcome == "different"


def test_a_flipped_bit_stops_the_run_with_its_file(start: StartOnDisk, tmp_path: Path) -> None:
    run = start()
    flip_a_bit(block_path(tmp_path, 2))
    for _ in range(2):  # and does so again
        with pytest.raises(CheckpointError, match=r"cached block changed: .*block-00002.*`--resume`"):
            run.train(1)


def test_a_flipped_bit_between_two_steps_stops_the_second(start: StartOnDisk, tmp_path: Path) -> None:
    run = start()
    run.train(1)
    flip_a_bit(block_path(tmp_path, 1))
    with pytest.raises(CheckpointError, match=r"cached block changed: .*block-00001"):
        run.train(1)


def test_a_file_that_is_cut_stops_the_run_with_its_file(start: StartOnDisk, tmp_path: Path) -> None:
    run = start()
    os.truncate(block_path(tmp_path, 3), 2000)
    with pytest.raises(CheckpointError, match=r"ended early: .*block-00003"):
        run.train(1)


def test_a_folder_that_is_removed_does_not_stop_the_run(
    start: StartOnDisk, oracle: Trajectory, tmp_path: Path
) -> None:
    run = start()
    for folder in tmp_path.iterdir():
        shutil.rmtree(folder)
    assert compare(oracle, run.train(2)).outcome == "equal"


# ---- a cache that is refused, full or shared


def test_without_a_cache_the_plan_is_refused(start_run: StartRun) -> None:
    with pytest.raises(ConfigError, match=r"cannot be streamed from the disk: .*Set `cache_dir`"):
        start_run(ON_DISK)


def test_a_folder_that_cannot_be_written_is_refused_only_where_blocks_must_lie_there(
    start: StartOnDisk, oracle: Trajectory, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(OutputError, match=r"Cannot save .*Nothing half-written"):
        start(folder=blocked / "cache")
    with pytest.warns(UserWarning, match="quantized store is not cached"):
        run = start(Plan(num_slots=2), folder=blocked / "cache")
    assert compare(oracle, run.train(2)).outcome == "equal"


def test_a_read_only_folder_with_the_store_in_it_is_enough(
    start: StartOnDisk, oracle: Trajectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    start().close()

    def refuse(*given: Any, **options: Any) -> None:
        raise PermissionError(30, "Read-only file system")

    for name in ("mkdir", "rename", "unlink", "write_text"):
        monkeypatch.setattr(Path, name, refuse)
    assert compare(oracle, start().train(2)).outcome == "equal"


def test_a_disk_that_fills_up_leaves_nothing_behind(
    start: StartOnDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, calls = store_cache.save_tensors, iter(range(100))

    def full(*given: Any) -> None:
        if next(calls) == 2:
            raise OSError(28, "No space left on device")
        save(*given)

    monkeypatch.setattr(store_cache, "save_tensors", full)
    with pytest.raises(OutputError, match=r"No space left on device.*Free some disk space"):
        start()
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_said_before_anything_is_quantized(
    start: StartOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 0, 10))  # type: ignore[attr-defined]
    monkeypatch.setattr("poros.model.BlockFiller.fill", None)
    with pytest.raises(OutputError, match="Not enough disk space for the quantized store"):
        start()


def test_a_damaged_store_is_made_again_beside_a_run_that_reads_it(
    start: StartOnDisk, oracle: Trajectory, tmp_path: Path
) -> None:
    reading = start()
    reading.train(1)
    os.unlink(block_path(tmp_path, 3))
    with pytest.warns(UserWarning, match="cached store is not used"):
        second = start()
    assert compare(oracle, second.train(2)).outcome == "equal"
    assert compare(oracle, reading.train(1)).outcome == "equal"


def test_two_runs_that_make_the_store_at_the_same_time_share_the_first_ones(
    start: StartOnDisk, oracle: Trajectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, other = store_cache.save_tensors, []

    def save_behind_another_run(*given: Any) -> None:
        if not other:
            other.append(None)
            other.append(start())  # begins, finishes and reads while the first one writes
        save(*given)

    monkeypatch.setattr(store_cache, "save_tensors", save_behind_another_run)
    first = start()
    second: CaseRun = other[1]
    stores = [run.model.store for run in (first, second)]
    inodes = [{os.fstat(f._descriptor).st_ino for f in store.files.values()} for store in stores]
    assert inodes[0] == inodes[1]
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    for run in (first, second):
        assert compare(oracle, run.train(2)).outcome == "equal"


def test_runs_side_by_side_read_one_store(start: StartOnDisk, oracle: Trajectory) -> None:
    runs = [start(), start(Plan(num_slots=3, disk_blocks=2))]
    for run in runs:
        run.train(1)
    for run in runs:
        assert compare(oracle, run.train(1)).outcome == "equal"


def test_filling_holds_one_block_of_what_goes_to_the_disk(
    start: StartOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses: set[int] = set()
    write = StoreCache._write

    def noting(self: StoreCache, key: str, num_blocks: int, block: Callable[[int], torch.Tensor]) -> None:
        def noted(index: int) -> torch.Tensor:
            made = block(index)
            addresses.add(made.data_ptr())
            return made

        write(self, key, num_blocks, noted)

    monkeypatch.setattr(StoreCache, "_write", noting)
    run = start(Plan(num_slots=2, disk_blocks=3))
    assert len(addresses) == 2  # the one in host memory, and the scratch block
    assert run.model.store.block(0).numel() > 0


def test_a_disk_is_read_ahead_of_the_visits(start: StartOnDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    taken_when_read: list[bool] = []
    take = DiskRing.take

    def noting(self: DiskRing, block: int) -> disk_ring.DiskRead:
        announced = bool(self._ahead) and self._ahead[0].block == block
        taken_when_read.append(announced)
        return take(self, block)

    monkeypatch.setattr(DiskRing, "take", noting)
    run = start()
    run.train(2)
    run.engine.evaluate(run.micro_batches(0))
    assert taken_when_read
    assert all(taken_when_read)


def test_a_second_close_does_nothing(start: StartOnDisk) -> None:
    run = start()
    run.train(1)
    run.close()
    run.close()
