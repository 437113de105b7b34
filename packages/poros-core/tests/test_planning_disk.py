"""How the disk tier is planned on this machine: the measured rate, what the user is told, the timeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import poros
from poros.blocks.disk_ring import RING_BUFFERS
from poros.engine.schedule import ScheduleRequest, make_schedule
from poros.errors import ConfigError
from poros.planning import measure_disk
from poros.planning.measure_disk import measure_disk_rate
from poros.planning.replay import SCALARS, replay, timeline_record
from poros.planning.timeline import Durations, Span, play
from poros.settings import Plan

MakeTrainer = Callable[..., poros.Trainer]
SMALL = 2 * 2**20


@pytest.fixture(autouse=True)
def little_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample that takes no time."""
    monkeypatch.setattr(measure_disk, "SAMPLE_BYTES", SMALL)
    monkeypatch.setattr(measure_disk, "PART_BYTES", SMALL // 4)


def test_the_rate_of_an_empty_folder_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    rate = measure_disk_rate(tmp_path / "cache")
    assert rate is not None
    assert rate > 0
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_store_that_lies_there_is_read_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").mkdir()
    (tmp_path / "key" / "block-00000.safetensors").write_bytes(bytes(SMALL))
    monkeypatch.setattr(measure_disk, "_write_sample", None)
    assert measure_disk_rate(tmp_path) is not None


def test_a_folder_that_refuses_has_no_rate(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert measure_disk_rate(tmp_path / "file" / "cache") is None


def test_a_run_says_what_it_reads_and_how_fast(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    with make_trainer(tmp_path / "run", plan=Plan(disk_blocks=1), cache_dir=tmp_path / "cache") as trainer:
        (note,) = [note for note in trainer.notes if "cache_dir" in note]
        assert note.startswith("1 of 2 blocks are read from the store in `cache_dir`")
        assert "measured there" in note
        assert trainer.planned.rates.disk_measured
        trainer.run()


def test_a_trainer_without_a_cache_refuses_the_disk(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Set `cache_dir`"):
        make_trainer(tmp_path, plan=Plan(disk_blocks=1))


def _play(read: float, compute: float, num_blocks: int = 12) -> tuple[Any, list[Span]]:
    schedule = make_schedule(
        ScheduleRequest(
            num_blocks=num_blocks,
            resident=frozenset(),
            slots=(None, None),
            num_micro_batches=1,
            order="block-major",
            lowest_backward=None,
        )
    )
    durations = Durations(
        copy=[0.1] * num_blocks,
        forward=[compute] * num_blocks,
        backward=[],
        loss=0.0,
        disk=dict.fromkeys(range(num_blocks), read),
    )
    spans: list[Span] = []
    return play(schedule, durations, spans), spans


def test_a_pass_takes_as_long_as_its_reads_or_its_visits() -> None:
    bound_by_disk, _ = _play(read=2.0, compute=0.5)
    assert bound_by_disk.seconds == pytest.approx(12 * 2.0 + 0.1 + 0.5)
    assert bound_by_disk.disk_seconds == pytest.approx(24.0)
    hidden, _ = _play(read=0.5, compute=2.0)
    assert hidden.seconds == pytest.approx(0.5 + 0.1 + 12 * 2.0)


def test_reads_run_ahead_by_the_rings_buffers_and_no_further() -> None:
    _, spans = _play(read=0.01, compute=2.0)
    reads = [span for span in spans if span.lane == "disk"]
    copies = [span for span in spans if span.lane == "copy"]
    for read, copy in zip(reads[RING_BUFFERS:], copies, strict=False):
        assert read.start >= copy.start + copy.seconds - 1e-9


def test_a_recorded_timeline_has_its_reads_again(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    # The head's chunk pushes blocks out of the slots.
    plan = Plan(num_slots=2, head="host", disk_blocks=2)
    with make_trainer(tmp_path / "run", plan=plan, cache_dir=tmp_path / "cache") as trainer:
        record = timeline_record(trainer.model.meta, trainer.model.numerics, trainer.planned, "cpu")
    _, spans = replay(record)
    assert {span.block for span in spans if span.lane == "disk"} <= {0, 1}
    assert any(span.lane == "disk" for span in spans)


@pytest.mark.parametrize(
    "forged",
    [
        {"num_slots": 10**9},
        {"num_blocks": 10**9},
        {"num_blocks": 10**9, "blocks": [[10**9, 1.0, 1.0, 1.0]]},
        {"resident_blocks": 3},
        {"lowest_backward": -1},
        {"num_slots": 1.5},
    ],
    ids=str,
)
def test_a_forged_timeline_is_refused_before_anything_grows(forged: dict[str, object]) -> None:
    record = {
        "passes": 1,
        "num_blocks": 2,
        "resident_blocks": 0,
        "num_slots": 2,
        "lowest_backward": 0,
        "blocks": [[2, 1.0, 1.0, 2.0]],
        "chunk_copies": [],
        **dict.fromkeys(SCALARS, 0.0),
    }
    replay(record)
    with pytest.raises(ValueError, match=r"slots|blocks"):
        replay(record | forged)
