"""Scales, charts and the timeline of the report."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from poros_cli.report.charts import Series, draw
from poros_cli.report.curves import number
from poros_cli.report.run_files import RunFiles
from poros_cli.report.scale import MAX_POINTS, thin, ticks
from poros_cli.report.step_timeline import step_timeline

TIMELINE = {
    "passes": 2,
    "num_blocks": 4,
    "resident_blocks": 0,
    "num_slots": 2,
    "lowest_backward": 0,
    "blocks": [[4, 0.002, 0.001, 0.003]],
    "chunk_copies": [],
    "head": 0.0,
    "loss": 0.001,
    "row_out": 0.0,
    "row_in": 0.0,
}


@pytest.mark.parametrize(
    ("least", "largest"),
    [(0, 1), (2.1, 2.9), (5, 5), (0, 0), (-3, 1e-3), (1e-9, 3e-9), (0, 1e99), (1.0, 1.0 + 1e-15)],
)
def test_ticks_enclose_both_ends_and_ascend(least: float, largest: float) -> None:
    found = ticks(least, largest)
    assert found[0] <= least
    assert found[-1] >= largest
    assert found == sorted(set(found))
    assert 2 <= len(found) <= 10


def test_many_points_are_put_together_without_losing_the_last() -> None:
    points = [(float(x), float(x)) for x in range(1, 10_001)]
    fewer, size = thin(points, max)
    assert len(fewer) <= MAX_POINTS
    assert size == 25
    assert fewer[-1] == (10_000.0, 10_000.0)


def test_a_chart_of_many_steps_says_what_a_point_is() -> None:
    line = Series(name="a", colour="c1", points=[(x, math.sin(x)) for x in range(1000)])
    chart = draw("A", [line], label=number)
    assert chart is not None
    assert chart.note == "Each point stands for 3 steps."
    assert len(chart.svg) < 20_000


def test_a_chart_without_points_is_none() -> None:
    nothing = Series(name="a", colour="c1", points=[(1, math.nan), (2, math.inf)])
    assert draw("A", [nothing, Series(name="b", colour="c2", points=[])], label=number) is None


def test_titles_and_labels_are_escaped_in_the_picture() -> None:
    line = Series(name="a", colour="c1", points=[(1, 1.0), (2, 2.0)])
    chart = draw('<b>"', [line], label=lambda value: "<i>")
    assert chart is not None
    assert "<b>" not in chart.svg
    assert "<i>" not in chart.svg


def test_waits_of_a_link_bound_pass_are_drawn_where_they_are(tmp_path: Path) -> None:
    run = RunFiles(
        folder=tmp_path, record={"predicted_timeline": TIMELINE}, steps=[], evaluations=[], oddities=()
    )
    timeline = step_timeline(run)
    copies, compute = timeline.lanes
    assert 'class="copy"' in copies.svg
    assert 'class="stall"' in compute.svg
    assert compute.svg.count('class="forward"') == compute.svg.count('class="backward"') == 4
    assert compute.busy.startswith("17 ms, ")
    assert "; waits " in compute.busy
    assert "A step is 2 such passes" in timeline.caption
    assert timeline.measured == ""
