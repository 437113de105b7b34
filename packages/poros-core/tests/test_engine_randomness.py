"""Dropout and recompute: the same draws in forward and recompute, others in every other visit."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from poros.determinism import preserved_generator, visit_seed
from poros.engine import templates
from poros.engine.engine import Engine
from poros.engine.template import BlockTemplate
from poros.parity.case_run import CaseRun
from poros.parity.compare import compare
from poros.parity.plain import train_plain
from poros.settings import ACCUMULATION_ORDERS, Plan

StartRun = Callable[..., CaseRun]
Recorded = dict[tuple[int, int, int], list[bytes]]

PLANS = [
    Plan(residency="resident"),
    *(
        Plan(num_slots=2, order=order, workspace=w)
        for order, w in zip(ACCUMULATION_ORDERS, (True, False), strict=True)
    ),
]
plans = pytest.mark.parametrize("plan", PLANS, ids=["resident", *ACCUMULATION_ORDERS])

NUM_STEPS = 3
NUM_VISITS = NUM_STEPS * 3 * 4  # steps, micro-batches, blocks


@pytest.fixture
def visit(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The (step, micro-batch, block) whose kernels run now, as a list of one."""
    current: list[tuple[int, int, int]] = []
    seed = Engine._seed

    def note(self: Engine, *key: int) -> None:
        current[:] = [key]  # type: ignore[list-item]
        seed(self, *key)

    monkeypatch.setattr(Engine, "_seed", note)
    return current


@pytest.fixture
def masks(visit: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Per visit, the dropout masks of its forward and of its recompute."""
    recorded: Recorded = defaultdict(list)
    current: dict[str, Any] = {"digest": None}
    forward, call = nn.Dropout.forward, BlockTemplate.call

    def record(self: nn.Dropout, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = forward(self, x)
        if visit:
            current["digest"].update((output == 0).numpy().tobytes())
        return output

    def whole_block(self: BlockTemplate, *args: Any, **options: Any) -> Any:
        current["digest"] = hashlib.sha256()
        output = call(self, *args, **options)
        if not visit:  # a search on tensors without values, before the first visit
            return output
        recorded[visit[0]].append(current["digest"].digest())
        return output

    monkeypatch.setattr(nn.Dropout, "forward", record)
    monkeypatch.setattr(BlockTemplate, "call", whole_block)
    return recorded


@plans
def test_masks_agree_between_forward_and_recompute_and_differ_between_all_visits(
    plan: Plan, masks: Recorded, start_run: StartRun
) -> None:
    start_run(plan, lora={"rank": 2, "dropout": 0.5}, num_steps=NUM_STEPS).train(NUM_STEPS)
    assert len(masks) == NUM_VISITS
    assert all(len(both) == 2 and both[0] == both[1] for both in masks.values())
    assert len({both[0] for both in masks.values()}) == NUM_VISITS


def test_masks_do_not_depend_on_the_plan(masks: Recorded, start_run: StartRun) -> None:
    found = []
    for plan in PLANS:
        masks.clear()
        start_run(plan, lora={"rank": 2, "dropout": 0.5}).train(1)
        found.append(dict(masks))
    assert found[0] == found[1] == found[2]


@plans
def test_every_block_recomputes_the_output_of_its_forward(
    plan: Plan, visit: list[tuple[int, int, int]], start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is left out of the recompute."""
    monkeypatch.setattr(templates, "unread_products", lambda meta, kind: frozenset())
    outputs: Recorded = defaultdict(list)
    call = BlockTemplate.call

    def record(self: BlockTemplate, *args: Any, **options: Any) -> Any:
        output, written = call(self, *args, **options)
        outputs[visit[0]].append(output.detach().view(torch.int16).numpy().tobytes())
        return output, written

    monkeypatch.setattr(BlockTemplate, "call", record)
    start_run(plan, lora={"rank": 2, "dropout": 0.3}, num_steps=NUM_STEPS).train(NUM_STEPS)
    assert len(outputs) == NUM_VISITS
    assert all(len(both) == 2 and both[0] == both[1] for both in outputs.values())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_step_leaves_the_default_generator_as_it_was(dropout: float, start_run: StartRun) -> None:
    run = start_run(lora={"rank": 2, "dropout": dropout})
    state = torch.get_rng_state()
    run.train(2)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_step_that_fails_leaves_the_default_generator_as_it_was(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_run(lora={"rank": 2, "dropout": 0.3})
    state = torch.get_rng_state()

    def fail(*args: Any) -> torch.Tensor:
        torch.rand(5)
        raise RuntimeError("in the middle")

    monkeypatch.setattr(BlockTemplate, "backward", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        run.train(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_evaluation_drops_nothing(masks: Recorded, start_run: StartRun) -> None:
    run = start_run(lora={"rank": 2, "dropout": 0.5})
    run.engine._generator = None
    first = run.engine.evaluate(run.micro_batches(0))
    run.train(1)
    run.model.bank.weights["lora_B"].zero_()
    second = run.engine.evaluate(run.micro_batches(0))
    third = run.engine.evaluate(run.micro_batches(0))
    assert first != second
    assert second == third


def test_gradients_with_dropout_are_those_of_ordinary_autograd(start_run: StartRun) -> None:
    """Case 34: without recompute there is only one mask, so a second one would show here."""
    lora = {"rank": 2, "dropout": 0.5}
    oracle, streamed = start_run(PLANS[0], lora=lora), start_run(PLANS[1], lora=lora)
    train_plain(oracle, 2)
    verdict = compare(oracle.trajectory, streamed.train(2))
    assert verdict.outcome == "equal", verdict.detail


def test_a_draw_that_no_module_announces_is_the_same_in_recompute(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family may drop by function call, with a probability that no `nn.Dropout` states."""
    forward = Qwen2MLP.forward
    monkeypatch.setattr(
        Qwen2MLP, "forward", lambda self, x: F.dropout(forward(self, x), 0.3, training=self.training)
    )
    oracle, streamed = start_run(PLANS[0]), start_run(PLANS[1])
    train_plain(oracle, 2)
    verdict = compare(oracle.trajectory, streamed.train(2))
    assert verdict.outcome == "equal", verdict.detail


def test_seeds_of_visits_differ_in_every_coordinate_and_fit_the_cpu_generator() -> None:
    seeds = {
        visit_seed(r, s, m, b) for r in range(3) for s in range(12) for m in range(12) for b in range(12)
    }
    assert len(seeds) == 3 * 12**3
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_a_lent_generator_gets_its_state_back(cpu: torch.device) -> None:
    state = torch.get_rng_state()
    with preserved_generator(cpu) as generator:
        generator.manual_seed(1)
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), state)
