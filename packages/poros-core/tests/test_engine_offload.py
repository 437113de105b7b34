"""Boundary activations in host memory: every visit reads what an earlier one wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from poros.engine import offload
from poros.engine.offload import NUM_RING_ROWS, HostActivations
from poros.parity.case_run import CaseRun
from poros.parity.compare import compare
from poros.settings import Plan

CPU = torch.device("cpu")
SHAPES = ((2, 3), (1, 5))
D = 4


def value(boundary: int, micro_batch: int) -> float:
    return 10.0 * boundary + micro_batch + 1


def run_pass(
    activations: HostActivations, num_blocks: int, lowest: int | None, group: tuple[int, ...]
) -> None:
    """Walk forward and backward as the engine does; NaN is written wherever nothing is alive."""
    for block in range(num_blocks):
        activations.enter(block, "forward")
        for j in group:
            if block == 0:
                activations.state(0, j).fill_(value(0, j))
            assert activations.state(block, j).eq(value(block, j)).all()
            activations.state(block + 1, j).fill_(value(block + 1, j))
        activations.leave(block, "forward")
    for j in group:
        assert activations.state(num_blocks, j).eq(value(num_blocks, j)).all()
    if lowest is None:
        return
    for block in reversed(range(lowest, num_blocks)):
        activations.enter(block, "backward")
        for j in group:
            assert activations.state(block, j).eq(value(block, j)).all()
        activations.leave(block, "backward")
        for row in set(range(NUM_RING_ROWS)) - set(activations._place.values()):
            activations._row(row).fill_(torch.nan)


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("lowest", [None, 0, 1])
def test_every_visit_reads_what_was_written_for_it(num_blocks: int, lowest: int | None) -> None:
    activations = HostActivations(num_blocks, D, CPU, torch.float32)
    lowest = None if lowest is None else min(lowest, num_blocks - 1)
    for _ in range(2):
        activations.begin(SHAPES, together=True, lowest_backward=lowest)
        run_pass(activations, num_blocks, lowest, (0, 1))
    activations.close()


def test_micro_batches_one_after_the_other_share_the_rows() -> None:
    activations = HostActivations(6, D, CPU, torch.float32)
    activations.begin(SHAPES, together=False, lowest_backward=0)
    for group in ((0,), (1,)):
        run_pass(activations, 6, 0, group)
    assert activations._ring.numel() == NUM_RING_ROWS * 6 * D


def test_the_last_rows_of_the_way_down_never_leave_the_device() -> None:
    activations = HostActivations(9, D, CPU, torch.float32)
    activations.begin(SHAPES, together=True, lowest_backward=0)
    run_pass(activations, 9, 0, (0, 1))
    rows_moved = 9 + 1 - NUM_RING_ROWS
    assert activations.offloaded_bytes == activations.loaded_bytes == rows_moved * 11 * D * 4


def test_an_evaluation_moves_nothing() -> None:
    activations = HostActivations(9, D, CPU, torch.float32)
    activations.begin(SHAPES, together=True, lowest_backward=None)
    run_pass(activations, 9, None, (0, 1))
    assert activations.offloaded_bytes == activations.loaded_bytes == 0


# ---- copies as late as they may be


class LateLane:
    """Runs a copy only when somebody waits for its event: the latest that a side stream may be."""

    def __init__(self, device: torch.device) -> None:
        self._queue: list[tuple[torch.Tensor, torch.Tensor, list[Any]]] = []
        self._done = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Iterable[Any]) -> Any:
        self._queue.append((target, source, [event for event in after if event is not None]))
        return self, len(self._queue)

    def run_to(self, end: int) -> None:
        while self._done < end:
            target, source, after = self._queue[self._done]
            self._done += 1
            for lane, place in after:
                lane.run_to(place)
            target.copy_(source)


def wait_for(device: torch.device, event: Any) -> None:
    if event is not None:
        lane, place = event
        lane.run_to(place)


def wait_for_nothing(device: torch.device, event: Any) -> None:
    """The fault: whoever reads a row takes it as it is."""


@pytest.mark.parametrize(("wait", "outcome"), [(wait_for, "equal"), (wait_for_nothing, "different")])
def test_rows_that_arrive_late_are_waited_for(
    wait: Callable[..., None],
    outcome: str,
    start_run: Callable[..., CaseRun],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    oracle = start_run(Plan(residency="resident"), compute_dtype=torch.float32).train(2)
    monkeypatch.setattr(offload, "CopyLane", LateLane)
    monkeypatch.setattr(offload, "wait", wait)
    late = start_run(Plan(activations="host"), compute_dtype=torch.float32).train(2)
    assert compare(oracle, late).outcome == outcome
