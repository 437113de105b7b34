"""Whole steps: adapters anywhere, passes that end early, bytes that must not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from poros.blocks.store import checksum
from poros.engine.embedding import check_token_ids
from poros.engine.engine import Engine
from poros.engine.schedule import Visit
from poros.engine.static_states import MAX_CONTEXTS
from poros.engine.template import BlockTemplate
from poros.errors import UserError
from poros.parity.case_run import CaseRun, RandomBatch
from poros.parity.compare import compare
from poros.parity.plain import train_plain
from poros.settings import ACCUMULATION_ORDERS, Plan

StartRun = Callable[..., CaseRun]
RESIDENT = Plan(residency="resident")
BLOCK_MAJOR, MICRO_BATCH_MAJOR = ACCUMULATION_ORDERS

# ---- case 11: a frozen base under the adapters


@pytest.mark.parametrize(
    ("lora", "order"),
    [
        ({"blocks": (3,)}, BLOCK_MAJOR),
        ({"blocks": (0,)}, MICRO_BATCH_MAJOR),
        ({"targets": ("q_proj",)}, BLOCK_MAJOR),
        ({"blocks": (1,), "targets": ("down_proj",)}, MICRO_BATCH_MAJOR),
    ],
    ids=["last block", "first block", "q_proj", "one layer"],
)
def test_adapters_anywhere_get_the_gradients_of_ordinary_autograd(
    lora: dict[str, Any], order: str, start_run: StartRun
) -> None:
    lora = {"rank": 2, **lora}
    oracle, streamed = start_run(RESIDENT, lora=lora), start_run(Plan(num_slots=2, order=order), lora=lora)
    train_plain(oracle, 2)
    verdict = compare(oracle.trajectory, streamed.train(2))
    assert verdict.outcome == "equal", verdict.detail
    for _, _, gradient in streamed.model.bank.tensors(streamed.model.bank.gradients):
        assert gradient.any()


def test_blocks_below_the_lowest_adapter_have_no_backward_visit(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_run(lora={"rank": 2, "blocks": (2,)})
    backward = []
    visit = Engine._visit

    def note(self: Engine, op: Visit, state: Any) -> None:
        if op.direction == "backward":
            backward.append(op.block)
        visit(self, op, state)

    monkeypatch.setattr(Engine, "_visit", note)
    run.train(1)
    assert backward == [3, 2]


# ---- case 45: stored bytes are immutable


@pytest.mark.parametrize(
    ("plan", "quantization"),
    [
        (RESIDENT, "nf4"),
        (Plan(num_slots=2), "nf4"),
        (Plan(num_slots=3, workspace=True), "nf4"),
        (Plan(num_slots=2), "bf16_bitwise"),
    ],
    ids=["resident", "streamed", "workspace", "bf16"],
)
def test_the_store_s_checksum_is_the_same_after_training(
    plan: Plan, quantization: str, start_run: StartRun
) -> None:
    run = start_run(plan, weight_format=quantization)
    before = checksum(run.model.store)
    run.train(2)
    run.engine.evaluate(run.micro_batches(0))
    assert checksum(run.model.store) == before


def test_the_checksum_sees_one_bit(start_run: StartRun) -> None:
    run = start_run()
    before = checksum(run.model.store)
    run.model.store.block(2)[-300] ^= 1
    assert checksum(run.model.store) != before


def test_a_tensor_that_leaves_its_slot_is_noticed(start_run: StartRun) -> None:
    run = start_run()
    run.train(1)
    template = next(iter(run.engine._templates))
    linear = next(module for module in template.module.modules() if getattr(module, "has_bias", False))
    linear.bias_view = linear.bias_view.clone()  # what a library does that casts a bias in place
    with pytest.raises(AssertionError, match="left its slot"):
        template.assert_bound()


# ---- case 56: passes that end early


@pytest.mark.parametrize(
    ("method", "order"),
    [("forward", BLOCK_MAJOR), ("backward", BLOCK_MAJOR), ("backward", MICRO_BATCH_MAJOR)],
)
def test_a_step_that_fails_in_the_middle_leaves_no_trace_in_the_next(
    method: str, order: str, start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(num_slots=2, order=order)
    undisturbed = start_run(plan).train(2)
    run = start_run(plan)
    run.train(1)
    real = getattr(BlockTemplate, method)
    calls = 0

    def fail(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("in the middle")
        output: torch.Tensor = real(*args)
        return output

    with monkeypatch.context() as patch:
        patch.setattr(BlockTemplate, method, fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            run.engine.step(run.micro_batches(1), 1)
    verdict = compare(undisturbed, run.train(1))
    assert verdict.outcome == "equal", verdict.detail


def test_a_copy_that_fails_half_way_is_made_again(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = start_run().train(2)
    run = start_run()
    run.train(1)
    slots = run.engine.slots
    assert slots is not None

    copy = slots._copy

    def half(block: int, source: torch.Tensor, slot: int) -> None:
        if block:
            copy(block, source, slot)
        else:  # the block that the next pass would look for first
            slots.buffers[slot][: source.numel() // 2].copy_(source[: source.numel() // 2])
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(slots, "_copy", half)
        with pytest.raises(KeyboardInterrupt):
            run.engine.step(run.micro_batches(1), 1)
    verdict = compare(undisturbed, run.train(1))
    assert verdict.outcome == "equal", verdict.detail


def test_an_evaluation_s_loss_does_not_depend_on_the_plan(start_run: StartRun) -> None:
    found = set()
    for plan in (RESIDENT, Plan(num_slots=2), Plan(num_slots=4, order=MICRO_BATCH_MAJOR, workspace=True)):
        run = start_run(plan)
        found.add(run.engine.evaluate(run.micro_batches(0)))
    assert len(found) == 1


# ---- tokens


@pytest.mark.parametrize("field", ["input_ids", "labels"])
@pytest.mark.parametrize("token", [61, 10**6, -1])
def test_a_token_outside_the_vocabulary_is_named(token: int, field: str) -> None:
    batch = RandomBatch(torch.ones(1, 4, dtype=torch.int64), torch.ones(1, 4, dtype=torch.int64))
    getattr(batch, field)[0, 2] = token
    with pytest.raises(UserError, match=rf"expected ids from 0 to 60, got {token} \(`{field}`"):
        check_token_ids(batch, 61)


@pytest.mark.parametrize("plan", [RESIDENT, Plan(num_slots=2)], ids=["resident", "streamed"])
def test_tokens_are_checked_before_anything_runs(plan: Plan, start_run: StartRun) -> None:
    ids = torch.full((1, 4), 61)
    with pytest.raises(UserError, match="not in the model's vocabulary"):
        start_run(plan).engine.step([RandomBatch(ids, ids)], 0)


# ---- what is kept between steps


def test_more_slots_than_blocks_take_no_more_memory(start_run: StartRun) -> None:
    slots = start_run(Plan(num_slots=50)).engine.slots
    assert slots is not None
    assert len(slots.buffers) == 4


def test_one_block_still_has_two_slots(start_run: StartRun, tiny_case: Any) -> None:
    def one_block() -> Any:
        config = tiny_case.make_config()
        config.num_hidden_layers = 1
        config.layer_types = config.layer_types[:1]
        return config

    streamed = start_run(Plan(num_slots=5), make_config=one_block).train(2)
    verdict = compare(start_run(RESIDENT, make_config=one_block).train(2), streamed)
    assert verdict.outcome == "equal", verdict.detail


def test_a_second_step_copies_only_what_the_slots_do_not_hold(start_run: StartRun) -> None:
    run = start_run(Plan(num_slots=3))
    (kind,) = run.model.kinds
    run.train(1)
    assert run.engine.take_statistics().h2d_bytes == (4 + 1) * kind.layout.num_bytes
    run.train(1)
    assert run.engine.take_statistics().h2d_bytes == 2 * (4 - 3) * kind.layout.num_bytes


def test_a_resident_run_copies_nothing(start_run: StartRun) -> None:
    run = start_run(RESIDENT)
    run.train(1)
    assert run.engine.take_statistics().h2d_bytes == 0


def test_contexts_of_old_shapes_are_let_go(start_run: StartRun) -> None:
    run = start_run()
    for tokens in range(2, MAX_CONTEXTS + 6):
        ids = torch.ones(1, tokens, dtype=torch.int64)
        run.engine.evaluate([RandomBatch(ids, ids)])
    assert len(run.engine._states._contexts) == MAX_CONTEXTS
    assert (1, MAX_CONTEXTS + 5) in run.engine._states._contexts


def test_shapes_that_change_from_step_to_step_change_no_bit(start_run: StartRun) -> None:
    """Activations share one buffer that grows; what an earlier, larger step left in it must not matter."""
    shapes = ((9, 4), (5,), (7,)), ((30, 2),), ((3,), (3,))

    def train(plan: Plan) -> Any:
        run = start_run(plan, row_lengths=shapes[0])
        for lengths in (*shapes[1:], shapes[0]):
            run.train(1)
            object.__setattr__(run.case, "row_lengths", lengths)
        return run.train(1)

    verdict = compare(train(RESIDENT), train(Plan(num_slots=2, order=MICRO_BATCH_MAJOR)))
    assert verdict.outcome == "equal", verdict.detail


# ---- compiled blocks


class NoCompilerError(torch._dynamo.exc.TorchDynamoException):
    inner_exception = RuntimeError("cc: command not found")


def test_a_block_that_cannot_be_compiled_is_refused_in_the_compiler_s_words(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **options: object) -> Callable[..., None]:
        def call(*args: object) -> None:
            raise NoCompilerError

        return call

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(UserError, match=r"Cannot compile a block: .* RuntimeError: cc: command not found"):
        start_run(blocks="compiled").train(1)
