"""The bench measures whole steps, compares bits, and turns every failure into a result."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from poros.bench import BenchSpec, SpareProcess, bound_share, serve, time_steps, with_floor
from poros.bench.measure import run
from poros.bench.source import BenchSource
from poros.errors import BudgetError, ConfigError

SIZES = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 67,
    "tie_word_embeddings": False,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder that holds a config and no weights."""
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    return str(tmp_path)


def spec(model: str, **changes: object) -> BenchSpec:
    values = {"model": model, "device": "cpu", "tokens": 8, "warmup_steps": 1, "steps": 2, "rank": 4}
    return BenchSpec(**{**values, "plan": {"num_slots": 2}, **changes})  # type: ignore[arg-type]


def test_a_measurement_reports_time_memory_and_traffic_of_whole_steps(model: str) -> None:
    result = run(json.loads(spec(model, micro_batches=2).to_json()))
    assert len(result["all_step_seconds"]) == 2
    assert result["tokens_per_second"] == pytest.approx(16 / result["step_seconds"])
    assert 0 < result["h2d_bytes_per_step"] < 4 * result["store_payload_bytes"]
    assert result["link_bytes_per_second"] > 0
    assert result["plan"]["num_slots"] == 2


def test_the_host_store_is_counted_without_what_stays_on_the_device(model: str) -> None:
    results = [
        run(json.loads(spec(model, plan={"num_slots": 2, "resident_blocks": count}).to_json()))
        for count in (0, 2)
    ]
    assert results[0]["store_payload_bytes"] == 3 * results[1]["store_payload_bytes"]
    assert all(r["store_allocated_bytes"] >= r["store_payload_bytes"] for r in results)


def test_a_planned_run_is_the_planners_choice_within_the_limit(model: str) -> None:
    limit = 10**9
    planned = spec(model, plan={"residency": "streamed"}, planned=True, memory_limit_bytes=limit)
    result = run(json.loads(planned.to_json()))
    assert result["plan"]["residency"] == "streamed"
    assert 0 < result["predicted"]["device_bytes"] <= limit
    with pytest.raises(BudgetError, match="smallest plan"):
        run(json.loads(replace(planned, memory_limit_bytes=1000).to_json()))


def test_a_check_compares_the_plan_with_a_resident_run_bit_by_bit(model: str) -> None:
    result = run(json.loads(spec(model, mode="check").to_json()))
    assert (result["verdict"], result["oracle_finite"]) == ("equal", True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "`steps`: expected at least 1, got 0"),
        ({"tokens": 1}, "`tokens`: expected at least 2, got 1"),
        ({"mode": "guess"}, "`mode`: expected time | check, got guess"),
    ],
)
def test_settings_that_measure_nothing_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("|", r"\|")):
        spec("anywhere", **changes)


def test_steps_are_timed_after_the_warm_up_and_the_median_is_taken() -> None:
    seen: list[int] = []
    times = time_steps(seen.append, torch.device("cpu"), warmup_steps=2, steps=3)
    assert seen == [0, 1, 2, 3, 4]
    assert (len(times.warmup_seconds), len(times.all_step_seconds)) == (2, 3)
    assert times.step_seconds == sorted(times.all_step_seconds)[1]


def test_the_bound_is_the_slower_of_link_and_compute() -> None:
    assert bound_share(2.0, compute_floor=1.0, h2d_bytes=30, link=20) == 0.75
    assert bound_share(2.0, compute_floor=1.8, h2d_bytes=30, link=20) == 0.9


def test_a_streamed_result_is_set_against_the_resident_one() -> None:
    streamed = {"step_seconds": 3.0, "h2d_bytes_per_step": 40.0, "link_bytes_per_second": 20.0}
    together = with_floor(streamed, {"step_seconds": 1.5})
    assert (together["slowdown"], together["link_floor_seconds"], together["bound_share"]) == (
        2.0,
        2.0,
        2 / 3,
    )


def test_a_large_matrix_is_drawn_in_slices_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poros.bench.source.SLICE_ELEMENTS", 16)
    source = BenchSource({"weight": (5, 8)}, 1, torch.device("cpu"))
    drawn = source.load("weight", torch.device("cpu"))
    assert drawn.shape == (5, 8)
    assert len({tuple(row.tolist()) for row in drawn}) == 5
    assert source.names() == ["weight"]


def raises(error: Exception) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    def fail(_: Mapping[str, Any]) -> dict[str, Any]:
        raise error

    return fail


@pytest.mark.parametrize(
    ("work", "kind"),
    [
        (lambda values: {"seen": values["x"]}, None),
        (raises(RuntimeError("no")), "failed"),
        (raises(torch.OutOfMemoryError("no")), "out of memory"),
        (raises(ImportError("no")), "not installed"),
        (raises(ConfigError("no")), "refused"),
    ],
)
def test_a_worker_writes_its_result_or_an_error_of_its_kind(
    work: Callable[[Mapping[str, Any]], dict[str, Any]],
    kind: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "result.json"
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({"x": 3, "output": str(output)}) + "\n"))
    serve(work)
    result = json.loads(output.read_text())
    assert result.get("error", {}).get("kind") == kind
    assert kind is not None or result == {"seen": 3}


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ("print('a word of explanation'); raise SystemExit(9)", "failed"),
        ("import time; print('a word of explanation', flush=True); time.sleep(60)", "too slow"),
    ],
)
def test_a_process_that_gives_no_result_is_an_error_with_its_output(script: str, kind: str) -> None:
    with SpareProcess([sys.executable, "-c", script]) as process:
        error = process.run({}, timeout_seconds=2.0)["error"]
    assert error["kind"] == kind
    assert "a word of explanation" in error["trace"]


def test_a_process_reads_its_line_and_its_result_comes_back() -> None:
    script = "import json, sys; v = json.loads(input()); json.dump({'got': v['x']}, open(v['output'], 'w'))"
    with SpareProcess([sys.executable, "-c", script]) as process:
        assert process.run({"x": 3}) == {"got": 3}
