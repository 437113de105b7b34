"""Memory predictions and limits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from transformers import Qwen2Config

import poros
from poros.errors import BudgetError
from poros.planning.device_terms import CONTEXT_BYTES
from poros.planning.prediction import Prediction, predict
from poros.planning.shape import StepShape
from poros.run import describe_model
from poros.run.memory import (
    PROCESS_RESERVE_BYTES,
    STACK_BYTES,
    available_host_bytes,
    context_bytes,
    resolve_budget,
)
from poros.run.totals import shape_of, survey_steps

SHAPE = StepShape(num_micro_batches=4, micro_batch_size=2, tokens=512)


def prediction(
    plan: poros.Plan, *, layers: int = 28, tied: bool = False, shape: StepShape = SHAPE
) -> Prediction:
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=layers,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=tied,
    )
    _, _, meta = describe_model(config)
    return predict(meta, numerics=poros.Numerics(), plan=plan, shape=shape)


def test_streaming_needs_less_device_memory_than_residency_and_the_store_lies_on_the_host() -> None:
    streamed, resident = prediction(poros.Plan()), prediction(poros.Plan(residency="resident"))
    assert streamed.device_bytes < resident.device_bytes
    assert streamed.host["block store"] == resident.device["resident blocks"] == streamed.store_bytes


def test_a_7b_block_in_nf4_is_about_120_mb() -> None:
    (block,) = prediction(poros.Plan()).block_bytes
    assert 115e6 < block < 125e6


def test_a_tied_table_counts_once_where_everything_is_resident() -> None:
    plan = poros.Plan(residency="resident")
    assert "embedding" in prediction(plan).device
    assert "embedding" not in prediction(plan, tied=True).device


def test_device_memory_of_a_streamed_run_hardly_depends_on_depth() -> None:
    shallow, deep = prediction(poros.Plan(), layers=14), prediction(poros.Plan(), layers=28)
    terms = ("slots", "head", "loss chunk")
    assert all(shallow.device[name] == deep.device[name] for name in terms)


def test_one_micro_batch_at_a_time_keeps_fewer_activations() -> None:
    alone = prediction(poros.Plan(order="micro-batch-major")).device["boundary activations"]
    assert alone < prediction(poros.Plan()).device["boundary activations"]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "3000000000", "memory.current": "1000000000"}, 2 * 10**9 - PROCESS_RESERVE_BYTES),
        ({"memory.max": "3000000000"}, 3 * 10**9 - PROCESS_RESERVE_BYTES),
        ({"memory/memory.limit_in_bytes": "3000", "memory/memory.usage_in_bytes": "4000"}, 0),
    ],
)
def test_the_limit_of_a_container_counts(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_host_bytes(tmp_path) == (expected, "memory limit of this container or control group")


def test_without_a_limit_the_machine_decides(tmp_path: Path) -> None:
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text("max\n")
    (folder / "memory.current").write_text("1000\n")
    available, limit = available_host_bytes(tmp_path)
    assert limit == "free memory of this machine"
    assert 0 < available <= psutil.virtual_memory().total


@pytest.mark.parametrize(("name", "option"), [("RLIMIT_AS", "-v"), ("RLIMIT_DATA", "-d")])
def test_the_limits_of_the_process_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, option: str
) -> None:
    resource = pytest.importorskip("resource")
    memory = psutil.Process().memory_info()
    used = memory.vms if name == "RLIMIT_AS" else memory.data
    stacks = torch.get_num_threads() * STACK_BYTES
    limits = {getattr(resource, name): (used + stacks + 10**9, resource.RLIM_INFINITY)}
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits.get(which, unlimited))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**12))
    available, limit = available_host_bytes(tmp_path)
    assert limit == f"memory limit of this process, `ulimit {option}`"
    assert 0.9e9 < available <= 1e9


def test_a_process_limit_leaves_the_stacks_of_threads_that_are_still_to_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    resource = pytest.importorskip("resource")
    used = psutil.Process().memory_info().vms
    limits = {resource.RLIMIT_AS: (used + 2 * 2**20, -1), resource.RLIMIT_STACK: (3 * 2**20, -1)}
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits.get(which, unlimited))
    assert available_host_bytes(tmp_path)[0] == 0


@pytest.mark.parametrize("left", [0, 10**7])
def test_without_host_memory_to_measure_in_a_run_is_refused_before_anything_is_measured(
    make_trainer: Callable[..., poros.Trainer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left: int
) -> None:
    monkeypatch.setattr("poros.run.placement.available_host_bytes", lambda: (left, "the limit of a test"))
    monkeypatch.setattr("poros.run.placement.machine_rates", None)
    with pytest.raises(BudgetError, match=r"Too little host memory is left: .* \(the limit of a test\)"):
        make_trainer(tmp_path)


# Predicted over measured, from the receipts of one H200 (2026-11-30): 0.98 to 1.02 of what tensors occupied.
RATIO = (0.97, 1.15)
# They were made by an engine without graphs, whose loss held whole rows of the vocabulary.
FORMER_LOSS = poros.Numerics(loss_chunk_positions=256, loss_chunk_vocabulary=2**20)
FOLDER = Path(__file__).resolve().parents[3] / "validation" / "receipts"
RECEIPTS = [p for p in sorted(FOLDER.glob("residency-*.json")) if "peak_device_bytes" in p.read_text()]


@pytest.mark.parametrize("path", RECEIPTS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore:EXPERIMENTAL")
def test_predictions_agree_with_what_receipts_measured(path: Path) -> None:
    from poros_arch_qwen.real_shapes import real_config

    receipt = json.loads(path.read_text())
    shape, quantization = path.stem.removeprefix("residency-").rsplit("-", 1)
    _, _, meta = describe_model(real_config(shape, receipt["num_blocks"]), quantization=quantization)
    for result in receipt["results"].values():
        for measured in (result, result.get("large_step", {})):
            if "peak_device_bytes" not in measured:
                continue
            plan = poros.Plan(**{"graphs": False, **result.get("plan", {"residency": "resident"})})
            lengths = measured["row_lengths"]
            step = StepShape(
                num_micro_batches=len(lengths),
                micro_batch_size=len(lengths[0]),
                tokens=max(length for rows in lengths for length in rows),
            )
            predicted = predict(meta, numerics=FORMER_LOSS, plan=plan, shape=step)
            assert RATIO[0] < predicted.allocated_bytes / measured["peak_device_bytes"] < RATIO[1]


def test_attention_scores_are_kept_where_flash_attention_is_missing() -> None:
    config = Qwen2Config(num_hidden_layers=2)
    _, _, meta = describe_model(config)
    long = StepShape(num_micro_batches=1, micro_batch_size=1, tokens=8192)
    peaks = [
        predict(meta, numerics=poros.Numerics(), plan=poros.Plan(), shape=long, device_type=kind).device_bytes
        for kind in ("cpu", "cuda")
    ]
    assert peaks[0] - peaks[1] > config.num_attention_heads * 8192**2 * 4


def test_a_budget_above_what_is_free_is_cut_with_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poros.run.memory.available_host_bytes", lambda: (5 * 10**9, "free memory of a test"))
    budget, notes = resolve_budget(torch.device("cpu"), device_bytes=None, host_bytes=24 * 10**9)
    assert budget.host_bytes == 5 * 10**9
    assert notes == ("`ram` is 24.00 GB, more than there is: planned with 5.00 GB (free memory of a test).",)


@pytest.mark.parametrize(("asked", "cut"), [(24 * 10**9, True), (8 * 10**9, False), (None, False)])
def test_a_device_budget_is_cut_to_what_is_free(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, cut: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * 10**9, 16 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a test card")
    budget, notes = resolve_budget(torch.device("cuda", 0), device_bytes=asked, host_bytes=None)
    free = 11 * 10**9 + CONTEXT_BYTES
    assert budget.device_bytes == (asked if asked and not cut else free)
    assert budget.frugal is (asked is None)
    assert len(notes) == cut
    assert not cut or "a test card" in notes[0]


def test_memory_of_other_processes_is_not_taken_for_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10**9)
    for used, expected in ((700 * 10**6, 700 * 10**6), (30 * 10**9, CONTEXT_BYTES)):
        free = (64 * 10**9 - 10**9 - used, 64 * 10**9)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: free)
        assert context_bytes(torch.device("cuda", 0)) == expected


def test_a_held_out_row_longer_than_any_other_is_planned_for(make_steps: type) -> None:
    steps = make_steps()
    longest = steps.row(0)
    longest.input_ids = longest.labels = torch.ones(1, 40, dtype=torch.int64)
    largest, shape = survey_steps(steps, [longest])
    assert shape.tokens == shape_of(largest).tokens == 40


def test_the_largest_micro_batches_hold_the_longest_row_of_any_step(make_steps: type) -> None:
    steps = make_steps()
    largest, shape = survey_steps(steps, [steps.row(0), steps.row(5), steps.row(1)])
    everything = [batch for index in range(steps.num_steps) for batch in steps.step(index)]
    assert shape_of(largest).tokens == max(batch.input_ids.shape[1] for batch in everything)
    assert shape.tokens == shape_of(largest).tokens
    assert shape.step_positions == sum(batch.input_ids.numel() for batch in largest)
    assert shape.num_shapes == len({batch.input_ids.shape for batch in everything})
    assert shape.num_evaluation_shapes == 2
    assert len(largest) == max(len(steps.step(index)) for index in range(steps.num_steps))
