"""The drop-in module on a CUDA device, with blocks of Qwen3-0.6B's shape.

The parity cases of every family go through it in the gates (`-k module` of each package's test_parity.py).
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from poros.blocks.slots import CudaSlots
from poros.determinism import configure
from poros.interfaces import ParityCase
from poros.parity.case_run import start_case
from poros.parity.faults import DELAY_CYCLES, POISON_BYTE, UNWAITED_DELAY_CYCLES
from poros.parity.module import backward_step, case_module, module_against_engine, module_residency
from poros.plugins import Registry
from poros.settings import Plan
from poros.torch_module import visits

pytestmark = pytest.mark.gpu

NUM_BLOCKS, TOKENS, VOCABULARY = 4, 512, 4096


def qwen3_0_6b() -> Any:
    """Qwen3-0.6B's layers; fewer of them, and of the vocabulary."""
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )


CASE = ParityCase(
    name="qwen3-0.6b-blocks",
    architecture="qwen3",
    make_config=qwen3_0_6b,
    row_lengths=((TOKENS, 300), (TOKENS,)),
    lora={"rank": 16, "dropout": 0.1},
    num_steps=2,
    length_bucket=64,
    loss_chunk_positions=512,
    loss_chunk_vocabulary=2048,
)


@pytest.fixture(scope="module")
def cuda() -> torch.device:
    device = torch.device("cuda")
    configure(device)
    return device


PLANS = (
    Plan(num_slots=2),
    Plan(num_slots=3, workspace=True, resident_blocks=1),
    Plan(num_slots=2, pin_host_memory=False),
)


@pytest.mark.parametrize("plan", PLANS, ids=["slots", "workspace", "pageable"])
def test_streaming_changes_no_bit_of_real_shapes(plan: Plan, registry: Registry, cuda: torch.device) -> None:
    verdict = module_residency(CASE, registry, cuda, plan, num_steps=3)
    assert verdict.outcome == "equal", verdict.detail


def test_real_shapes_equal_the_engine(registry: Registry, cuda: torch.device) -> None:
    verdict = module_against_engine(CASE, registry, cuda)
    assert verdict.outcome == "equal", verdict.detail


class LateCopies(CudaSlots):
    """Copies that come late, into slots that are poisoned the moment they may be overwritten."""

    delay_cycles = DELAY_CYCLES

    def _copy(self, block: int, source: torch.Tensor, slot: int) -> None:
        with torch.cuda.stream(self.copy_stream):
            if (released := self._released[slot]) is not None:
                self.copy_stream.wait_event(released)
            self.buffers[slot].fill_(POISON_BYTE)
            torch.cuda._sleep(self.delay_cycles)
        super()._copy(block, source, slot)


def test_late_copies_into_poisoned_slots_change_no_bit(
    registry: Registry, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visits, "make_slots", LateCopies)
    verdict = module_residency(CASE, registry, cuda, PLANS[0], num_steps=2)
    assert verdict.outcome == "equal", verdict.detail


class UnwaitedCopies(LateCopies):
    """The fault: nobody waits for a copy."""

    delay_cycles = UNWAITED_DELAY_CYCLES

    def acquire(self, slot: int) -> None:
        return


def test_a_copy_that_nobody_waits_for_is_caught(
    registry: Registry, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visits, "make_slots", UnwaitedCopies)
    verdict = module_residency(CASE, registry, cuda, PLANS[0], num_steps=1)
    assert verdict.outcome == "different", verdict


def test_a_forward_keeps_block_inputs_and_no_weights(registry: Registry, cuda: torch.device) -> None:
    """What stays allocated between forward and backward is the same for two slots and for three."""
    grown = []
    for num_slots in (2, 3):
        plan = Plan(num_slots=num_slots)
        run = start_case(CASE, plan, registry, cuda)
        module = case_module(run, plan).train()
        backward_step(module, run, 0)
        module.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        gc.collect()  # what an earlier run left would be collected in between
        before = torch.cuda.memory_allocated()
        ids = torch.ones(2, TOKENS, dtype=torch.int64)
        loss = module(input_ids=ids, labels=ids).loss
        torch.cuda.synchronize()
        grown.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        run.close()
        del loss  # its graph holds the run's slots: they must not be freed while the next one is measured
    boundary = 2 * TOKENS * 1024 * torch.bfloat16.itemsize
    assert grown[0] == grown[1]
    # Block inputs and the loss's gradient; scalars and generator state are below one more boundary.
    assert (NUM_BLOCKS + 1) * boundary <= grown[0] < (NUM_BLOCKS + 2) * boundary


def test_the_module_refuses_to_leave_its_device(registry: Registry, cuda: torch.device) -> None:
    from poros.errors import UserError

    run = start_case(CASE, PLANS[0], registry, cuda)
    module = case_module(run, PLANS[0])
    for move in (lambda: module.cpu(), lambda: module.to("cpu"), lambda: module.half()):
        with pytest.raises(UserError, match="Cannot move or cast"):
            move()
    assert module.cuda() is module
    run.close()
