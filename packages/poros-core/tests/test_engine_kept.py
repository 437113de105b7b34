"""Forwards that are kept for their backward: the same bits as a recompute, or no keeping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from poros.engine.engine import Engine
from poros.engine.kept import KeptVisits, highest
from poros.engine.template import BlockTemplate
from poros.errors import ConfigError
from poros.parity.case_run import CaseRun
from poros.parity.compare import compare
from poros.settings import ACCUMULATION_ORDERS, Plan

StartRun = Callable[..., CaseRun]
RESIDENT = Plan(residency="resident")
KEPT = Plan(residency="resident", kept_blocks=3)
DROPOUT = {"rank": 2, "dropout": 0.3}


def count_recomputes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by one entry with every backward that recomputes."""
    calls: list[int] = []
    backward = BlockTemplate.backward

    def counted(self: BlockTemplate, *arguments: Any) -> Any:
        calls.append(1)
        return backward(self, *arguments)

    monkeypatch.setattr(BlockTemplate, "backward", counted)
    return calls


@pytest.mark.parametrize(
    "plan",
    [
        KEPT,
        replace(KEPT, order=ACCUMULATION_ORDERS[1], workspace=True),
        Plan(num_slots=2, resident_blocks=2, kept_blocks=2, activations="host"),
        Plan(num_slots=2, resident_blocks=4, kept_blocks=4),
    ],
    ids=["resident", "micro-batch-major", "partly streamed", "nothing streamed"],
)
def test_keeping_changes_no_bit(plan: Plan, start_run: StartRun) -> None:
    oracle, kept = start_run(RESIDENT, lora=DROPOUT), start_run(plan, lora=DROPOUT)
    verdict = compare(oracle.train(2), kept.train(2))
    assert verdict.outcome == "equal", verdict.detail


def test_the_highest_blocks_are_not_recomputed(start_run: StartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    assert highest(frozenset({0, 2, 5}), 2) == {2, 5}
    calls = count_recomputes(monkeypatch)
    run = start_run(KEPT)
    run.train(1)
    micro_batches = len(run.micro_batches(0))
    assert len(calls) == micro_batches  # of one block out of four


def test_a_forward_that_keeps_with_other_bits_is_recomputed_and_said_once(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = start_run(RESIDENT).train(1)
    record = BlockTemplate.record

    def other_bits(self: BlockTemplate, *arguments: Any) -> Any:
        recorded = record(self, *arguments)
        return replace(recorded, output=recorded.output * (1 + 2**-7))

    run = start_run(KEPT)
    monkeypatch.setattr(KeptVisits, "forward", _with_record(other_bits))
    with pytest.warns(RuntimeWarning, match="recomputed in backward after all") as said:
        verdict = compare(oracle, run.train(1))
    assert verdict.outcome == "equal", verdict.detail
    shapes = {batch.input_ids.shape for batch in run.micro_batches(0)}
    assert len(said) == len(shapes)


def _with_record(record: Callable[..., Any]) -> Callable[..., bool]:
    """Return `KeptVisits.forward` under which templates record so."""
    forward = KeptVisits.forward

    def patched(self: KeptVisits, template: BlockTemplate, *arguments: Any) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BlockTemplate, "record", record)
            return forward(self, template, *arguments)

    return patched


def test_a_tape_over_memory_that_the_next_visit_writes_is_caught(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: all kept forwards read their input from one place."""
    oracle = start_run(RESIDENT, compute_dtype=torch.float32).train(1)
    places: dict[torch.Size, torch.Tensor] = {}
    record = BlockTemplate.record

    def in_one_place(self: BlockTemplate, hidden: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        place = places.setdefault(hidden.shape, hidden.clone())
        place.copy_(hidden)
        return record(self, place.data, *arguments, **options)

    monkeypatch.setattr(BlockTemplate, "record", in_one_place)
    kept = start_run(KEPT, compute_dtype=torch.float32).train(1)
    assert compare(oracle, kept).outcome == "different"


def test_an_aborted_pass_leaves_nothing_kept(start_run: StartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = start_run(RESIDENT).train(1)
    run = start_run(KEPT)
    loss = Engine._loss

    def fail(self: Engine, *arguments: Any) -> None:
        raise RuntimeError("in between")

    monkeypatch.setattr(Engine, "_loss", fail)
    with pytest.raises(RuntimeError, match="in between"):
        run.train(1)
    monkeypatch.setattr(Engine, "_loss", loss)
    assert run.engine._kept._recorded
    run.engine.evaluate(run.micro_batches(0)[:1])
    assert not run.engine._kept._recorded
    assert compare(oracle, run.train(1)).outcome == "equal"
    assert not run.engine._kept._recorded


def test_a_block_in_a_slot_cannot_keep_its_forward() -> None:
    with pytest.raises(ConfigError, match="at most the 1 of `resident_blocks`"):
        Plan(num_slots=2, resident_blocks=1, kept_blocks=2)
