"""The short form of `nox -s crashes`: a few kills, full disks and shortages on purpose; no bit differs after."""

from __future__ import annotations

import importlib
import json
import random
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fcntl")
ROOT = Path(__file__).resolve().parents[3] / "validation"

# Area, file call and its number among the area's such calls.
POINTS = (
    ("rows cache", "write", 0),
    ("store cache", "write", 3),
    ("dry save", "rename", 0),
    ("records", "write", 3),
    ("save", "write", 1),
    ("save", "rename", 3),
    ("save", "rename", -1),
    ("pruning", "unlink", 1),
    ("final adapter", "write", 1),
    ("final adapter", "rename", 0),
)
FULL = (
    ("rows cache", "write", 0),
    ("records", "write", 2),
    ("save", "write", 1),
    ("final adapter", "mkdir", 0),
)


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    sys.path.insert(0, str(ROOT))
    names = ("file_faults", "tiny_run", "crashes", "full_disk", "starvation")
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    sys.path.remove(str(ROOT))


@pytest.fixture(scope="module")
def whole(scripts: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run that nobody disturbed: where it lies, its file calls, and what must be the same."""
    home = tmp_path_factory.mktemp("crashes")
    scripts.tiny_run.prepare(home)
    ended = scripts.tiny_run.start(home, home / "whole", count=True)
    assert ended.code == 0, ended.shown
    return SimpleNamespace(
        home=home, ended=ended, expected=scripts.crashes.evidence(home / "whole" / "output")
    )


def point(scripts: SimpleNamespace, whole: SimpleNamespace, area: str, name: str, which: int) -> int:
    calls = enumerate(whole.ended.calls)
    return [n for n, call in calls if scripts.file_faults.area_of(call) == area and call[0] == name][which]


@pytest.mark.parametrize(("area", "name", "which"), POINTS)
def test_a_run_that_is_killed_at_a_file_call_goes_on_with_the_same_bits(
    scripts: SimpleNamespace, whole: SimpleNamespace, tmp_path: Path, area: str, name: str, which: int
) -> None:
    fault = scripts.tiny_run.Fault(at=point(scripts, whole, area, name, which))
    tally = scripts.crashes.Tally()
    draw = random.Random(f"{area} {name} {which}")
    scripts.crashes.kill_and_go_on(whole.home, tmp_path / "trial", fault, whole.expected, tally, draw)
    assert (tally.equal, tally.bytes_lost) == (1, 0)
    assert tally.hits[area] >= 1


@pytest.mark.parametrize("area", ["step", "evaluation"])
def test_a_run_that_is_killed_by_the_clock_goes_on_with_the_same_bits(
    scripts: SimpleNamespace, whole: SimpleNamespace, tmp_path: Path, area: str
) -> None:
    fault = scripts.tiny_run.Fault(area=area, visit=2, delay=0.001)
    tally, draw = scripts.crashes.Tally(), random.Random(1)
    scripts.crashes.kill_and_go_on(whole.home, tmp_path / "trial", fault, whole.expected, tally, draw)
    assert (tally.equal, tally.bytes_lost) == (1, 0)


@pytest.mark.parametrize(("area", "name", "which"), FULL)
def test_a_full_disk_costs_a_message_and_no_bit(
    scripts: SimpleNamespace, whole: SimpleNamespace, tmp_path: Path, area: str, name: str, which: int
) -> None:
    at = point(scripts, whole, area, name, which)
    of_a_cache = area in scripts.full_disk.CACHES
    act = scripts.file_faults.cache_full if of_a_cache else scripts.file_faults.disk_full
    fault = scripts.tiny_run.Fault(at=at, act=act)
    tally = scripts.full_disk.Tally()
    scripts.full_disk.fill_and_go_on(tally, whole.home, tmp_path / "trial", fault, whole.expected)
    assert (tally.equal, tally.bytes_lost) == (1, 0)
    assert tally.finished_with_a_warning == of_a_cache


def test_two_runs_that_make_one_cache_at_once_have_equal_bits(
    scripts: SimpleNamespace, whole: SimpleNamespace, tmp_path: Path
) -> None:
    assert (
        scripts.starvation.two_runs_one_cache(whole.home, tmp_path / "pair", whole.expected) == "both equal"
    )


def test_runs_in_the_folder_of_a_running_one_are_refused_and_it_goes_on(
    scripts: SimpleNamespace, whole: SimpleNamespace, tmp_path: Path
) -> None:
    answer = scripts.starvation.output_in_use(whole.home, tmp_path / "used", whole.expected)
    assert answer == "both refused, the first equal"


@pytest.mark.skipif(sys.platform != "linux", reason="limits of other systems count otherwise")
@pytest.mark.parametrize("more_bytes", [20 * 10**6, 10**9])
def test_a_run_under_a_memory_limit_finishes_with_the_same_bits_or_refuses(
    scripts: SimpleNamespace, whole: SimpleNamespace, tmp_path: Path, more_bytes: int
) -> None:
    answer = scripts.starvation.under_process_limit(
        whole.home, tmp_path / "limited", whole.expected, resource.RLIMIT_AS, more_bytes
    )
    assert answer == ("refused" if more_bytes < 10**9 else "equal")


def receipt(name: str) -> Any:
    return json.loads((ROOT / "receipts" / f"{name}.json").read_text())["measured"]


def test_the_receipt_of_kills_on_record_holds() -> None:
    measured = receipt("crashes")
    assert measured["kills"] >= 100
    assert (measured["broken"], measured["bytes_lost"]) == ([], 0)


def test_the_receipt_of_full_disks_on_record_holds() -> None:
    measured = receipt("full-disk")
    assert measured["full"] == measured["equal"] > 0
    assert (measured["broken"], measured["bytes_lost"]) == ([], 0)


def test_the_receipt_of_shortages_on_record_holds() -> None:
    assert receipt("starvation")["broken"] == []
