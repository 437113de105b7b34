"""Tables and figures of docs/performance.md are what bench receipts say, whatever was or was not measured."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[3] / "validation" / "bench"
sys.path.insert(0, str(BENCH))

import bench_receipts  # noqa: E402
import cases  # noqa: E402
import figures  # noqa: E402
import svg  # noqa: E402
import tables  # noqa: E402

SECONDS = {"poros-streamed": 2.0, "poros-resident": 1.0, "peft": 4.0, "unsloth": 3.0, "soup": 5.0}
ENVIRONMENT = {"device": "cuda", "device_name": "a card", "driver": "1", "versions": {}, "commit": "abc"}


def result(row: cases.Row) -> dict[str, Any]:
    """Invented numbers; what fails or is compared has none."""
    if row.system == "check":
        return {"verdict": "equal", "num_steps": 3}
    if row.system == "soup":
        return {"error": {"kind": "not installed", "message": "no"}}
    seconds, resident = SECONDS[row.system], row.plan.get("resident_blocks", 0)
    return {
        "step_seconds": seconds - resident / 100,
        "tokens_per_step": row.case.tokens_per_step,
        "tokens_per_second": row.case.tokens_per_step / seconds,
        "peak_device_bytes": int((3 if row.system == "poros-streamed" else 9) * 1e9) + resident,
        "peak_host_bytes": 10**9,
        "plan": {"resident_blocks": resident},
        "predicted": {"device_bytes": 4 * 10**9, "step_seconds": 1.9},
        "h2d_bytes_per_step": 10.0**10,
        "link_bytes_per_second": 5.0 * 10**10,
        "exposed_copy_seconds": 0.1,
        "store_payload_bytes": 100,
        "store_allocated_bytes": 101,
    }


@pytest.fixture
def receipts(tmp_path: Path) -> list[bench_receipts.Receipt]:
    """One receipt of every row that a GPU would measure."""
    for row in cases.choose(list(cases.groups())):
        if row.case.shape != cases.TINY:
            content = {"environment": ENVIRONMENT, "row": asdict(row), "result": result(row)}
            (tmp_path / row.file_name).write_text(json.dumps(content))
    return bench_receipts.read_receipts(tmp_path)


def test_every_row_has_a_name_of_its_own() -> None:
    rows = [row for group in cases.groups().values() for row in group]
    by_file = {row.file_name: row for row in rows}
    assert all(by_file[row.file_name] == row for row in rows)


def test_an_unknown_row_is_refused() -> None:
    with pytest.raises(SystemExit, match="names no row"):
        cases.choose(["8b-*"])


def test_every_group_with_a_pattern_chooses_some_of_its_rows() -> None:
    chosen = cases.choose(["targets:7b-*"])
    assert 0 < len(chosen) < len(cases.groups()["targets"])


def test_receipts_of_a_cpu_say_nothing_about_speed(tmp_path: Path) -> None:
    row = cases.groups()["tiny"][0]
    content = {"environment": ENVIRONMENT | {"device": "cpu"}, "row": asdict(row), "result": {}}
    (tmp_path / row.file_name).write_text(json.dumps(content))
    assert bench_receipts.read_receipts(tmp_path) == []


def test_without_receipts_every_table_says_so() -> None:
    assert tables.steps_table([]) == tables.frontier_table("7b", []) == tables.NOTHING
    assert (
        tables.ablation_table([]) == tables.checks_table([]) == tables.break_even_list([]) == tables.NOTHING
    )


def test_a_step_stands_beside_its_resident_run_and_its_peers(receipts: list[bench_receipts.Receipt]) -> None:
    (line,) = (
        text
        for text in tables.steps_table(receipts).splitlines()
        if "7b, 1 x 1 x 512 tokens, eager |" in text
    )
    cells = [cell.strip().partition("]")[0] for cell in line.strip("|").split("|")]
    assert cells[1:] == [
        "[2.000 s, 3.00 GB",
        "<= 0.15 s: missed",
        "<= 3 GB: met",
        "[1.000 s, 9.00 GB",
        "[4.000 s, 9.00 GB",
        "[3.000 s, 9.00 GB",
        "[not installed",
    ]


def test_the_readme_shows_one_line_per_step(receipts: list[bench_receipts.Receipt]) -> None:
    lines = tables.headline_table(receipts).splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines[:2]] == ["7b, 512", "7b, one sequence of 2048"]
    assert len(lines) == 8
    assert all("](validation/receipts/bench-" in line for line in lines)


def test_the_frontier_takes_the_best_setting_that_fits(receipts: list[bench_receipts.Receipt]) -> None:
    points = bench_receipts.frontier(receipts, "7b", ("poros-streamed", "poros-resident"), (2, 4, 16))
    assert [point.budget_gb for point in points] == [4, 16]
    assert points[0].tokens_per_second == 16 * 512 / 2.0
    assert points[0].receipt.row["case"]["name"] == "7b-16x512"


def test_slowdowns_leave_out_resident_blocks_and_ablations(receipts: list[bench_receipts.Receipt]) -> None:
    found = bench_receipts.slowdowns(receipts, "7b", "eager")
    assert [(tokens, ratio) for tokens, ratio, _ in found] == [(512, 2.0)]


def test_streaming_costs_nothing_from_where_the_link_is_faster(
    receipts: list[bench_receipts.Receipt],
) -> None:
    # 10 GB at 50 GB/s are 0.2 s; resident computes 512 tokens in 1 s.
    tokens = bench_receipts.break_even_tokens(receipts, "7b", "eager")
    assert tokens == pytest.approx(0.2 * 512 / bench_receipts.EQUAL_SLOWDOWN)


def test_the_ablation_shows_each_cost_alone(receipts: list[bench_receipts.Receipt]) -> None:
    text = tables.ablation_table(receipts)
    assert text.count("graphs replayed") == text.count("kernels launched one by one") == 2
    assert (
        "[1.000 s](../validation/receipts/bench-7b-8mb-poros-resident-eager-ablation-graphs.json) (-50%)"
        in text
    )


def test_every_chart_is_an_svg_document(receipts: list[bench_receipts.Receipt]) -> None:
    made = figures.charts(receipts)
    assert set(made) == {"slowdown.svg", "budget.svg", "frontier-7b.svg", "frontier-32b.svg"}
    for chart in made.values():
        assert ET.fromstring(svg.draw(chart)).tag.endswith("svg")


def test_a_chart_places_larger_values_higher_and_further_right() -> None:
    chart = svg.Chart(
        title="t", x_label="x", y_label="y", lines=[svg.Line("a", [(1, 1), (4, 3)])], log_x=True
    )
    dots = [
        element.attrib for element in ET.fromstring(svg.draw(chart)).iter() if element.tag.endswith("circle")
    ]
    assert float(dots[0]["cx"]) < float(dots[1]["cx"])
    assert float(dots[0]["cy"]) > float(dots[1]["cy"])


def test_the_figures_on_disk_are_those_of_the_receipts() -> None:
    made = {name: svg.draw(chart) for name, chart in figures.charts(bench_receipts.read_receipts()).items()}
    found = {path.name: path.read_text() for path in figures.FOLDER.glob("*.svg")}
    assert found == made, "run `uv run nox -s docs -- --write`"
