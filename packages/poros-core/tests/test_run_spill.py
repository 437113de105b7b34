"""A driver that spills device memory is noticed by slow steps on a full card, and by nothing less."""

from __future__ import annotations

import pytest
import torch

from poros.run import StepEvent
from poros.run.spill import NUM_NEEDED, SpillWatch, driver_spills, spill_watches


def step(number: int, seconds: float, tokens: int = 100) -> StepEvent:
    return StepEvent(
        step=number,
        loss=1.0,
        learning_rate=1.0,
        grad_norm=1.0,
        tokens=tokens,
        supervised_tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        h2d_bytes=0,
        exposed_copy_seconds=0.0,
        peak_device_bytes=0,
        grown_host_bytes=0,
    )


def told(last: StepEvent, free_bytes: int, usual: int = NUM_NEEDED) -> list[str]:
    said: list[str] = []
    watch = SpillWatch(lambda: free_bytes, said.append)
    for number in range(usual):
        watch.on_step(step(number + 1, 1.0))
    watch.on_step(last)
    watch.on_step(last)
    return said


def test_slow_steps_on_a_full_card_are_said_once_with_the_setting() -> None:
    (sentence,) = told(step(9, 4.0), 10**8)
    assert sentence.startswith("Step 9 took 4 s where 1 s are usual, and 100 MB of device memory are free")
    assert "Prefer No Sysmem Fallback" in sentence


@pytest.mark.parametrize(
    ("last", "free_bytes", "usual"),
    [
        (step(9, 4.0), 10**9, NUM_NEEDED),  # there is room
        (step(9, 2.9), 10**8, NUM_NEEDED),  # not slow enough
        (step(9, 4.0, tokens=400), 10**8, NUM_NEEDED),  # a larger step
        (step(9, 4.0), 10**8, NUM_NEEDED - 2),  # nothing is usual yet
    ],
)
def test_nothing_is_said_otherwise(last: StepEvent, free_bytes: int, usual: int) -> None:
    assert told(last, free_bytes, usual) == []


@pytest.mark.parametrize(
    ("system", "release", "spills"),
    [("Windows", "11", True), ("Linux", "5.15.1-microsoft-standard-WSL2", True), ("Linux", "6.8.0", False)],
)
def test_only_the_drivers_of_windows_spill(system: str, release: str, spills: bool) -> None:
    assert driver_spills(system, release) is spills


def test_there_is_nothing_to_watch_on_a_cpu() -> None:
    assert spill_watches(torch.device("cpu"), print) == []
