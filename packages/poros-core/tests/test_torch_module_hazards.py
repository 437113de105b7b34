"""The aliasing hazard: what autograd keeps must not be what a slot holds. And what it keeps instead, in bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import poros
from poros.blocks.slots import HostSlots
from poros.torch_module import autograd, visits

MakeModule = Callable[..., Any]

BATCH, TOKENS, HIDDEN, BLOCKS = 2, 8, 32, 4
FLOAT_BYTES = 4
# All bits set is a NaN.
POISON_BYTE = 0xFF


def given(seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 60, (BATCH, TOKENS), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def step(module: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = module(**given()).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


class TapedVisit(torch.autograd.Function):
    """The fault: the forward is taped, and backward runs over that tape without bringing the block back."""

    @staticmethod
    def forward(ctx: Any, runner: Any, call: Any, hidden: torch.Tensor, *tensors: torch.Tensor) -> Any:
        leaf = hidden.detach().requires_grad_()
        with runner._visit(call, tensors, direction=1) as template, torch.enable_grad():
            parameters = template.adapter_parameters()
            output, _ = template.call(leaf, runner._contexts.context(call.shape), {})
        ctx.tape = output, leaf, parameters
        return (output.detach(),)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        output, leaf, parameters = ctx.tape
        return None, None, *torch.autograd.grad(output, [leaf, *parameters], grads[0], allow_unused=True)


class UntrackedSlots(HostSlots):
    """Slots that are filled behind autograd's back, as a copy engine fills them."""

    def _finish(self, slot: int) -> None:
        source = self._pending.pop(slot, None)
        if source is not None:
            self.buffers[slot].data[: source.numel()].copy_(source)


class UntrackedRegion(visits.StaticRegion):
    """Adapter weights of which autograd does not see the next block's copy, as of a graph's replay."""

    def weight(self, tensor: Any) -> torch.Tensor:
        return super().weight(tensor).data


@pytest.mark.parametrize("quantization", ["nf4", "bf16_bitwise"])
def test_a_tape_over_slots_is_caught_and_its_loss_looks_right(
    make_module: MakeModule, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, expected = step(make_module(quantization=quantization))
    monkeypatch.setattr("poros.torch_module.model.BlockVisit", TapedVisit)
    monkeypatch.setattr(visits, "StaticRegion", UntrackedRegion)
    monkeypatch.setattr(visits, "make_slots", UntrackedSlots)
    wrong_loss, found = step(make_module(quantization=quantization))
    assert torch.equal(wrong_loss, loss)
    assert found.keys() == expected.keys()
    assert any(not torch.equal(found[name], grad) for name, grad in expected.items())


def test_the_control_is_wrong_because_of_the_slots_alone(
    make_module: MakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one block adapted and everything resident, the same tape is right."""
    lora = poros.LoraSettings(rank=4, blocks=(BLOCKS - 1,))
    _, expected = step(make_module(lora, residency="resident"))
    monkeypatch.setattr("poros.torch_module.model.BlockVisit", TapedVisit)
    monkeypatch.setattr(visits, "StaticRegion", UntrackedRegion)
    _, found = step(make_module(lora, residency="resident"))
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


class PoisonedSlots(HostSlots):
    """Overwrites a slot with NaN the moment that its visit ends."""

    def release(self, slot: int) -> None:
        self.buffers[slot].fill_(POISON_BYTE)
        self.contents[slot] = None


def test_nothing_is_read_from_a_slot_after_its_visit(
    make_module: MakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = step(make_module(residency="resident"))
    monkeypatch.setattr(visits, "make_slots", PoisonedSlots)
    _, found = step(make_module())
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


def test_the_latest_legal_copy_changes_no_bit(
    make_module: MakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = step(make_module(residency="resident"))
    monkeypatch.setattr(visits, "make_slots", lambda *given: HostSlots(*given, lazy=True))
    _, found = step(make_module())
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


def test_a_copy_that_fails_leaves_a_module_that_works(
    make_module: MakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make_module()
    loss, expected = step(module)
    module.zero_grad(set_to_none=True)
    real = HostSlots._copy

    def fail(self: HostSlots, block: int, source: torch.Tensor, slot: int) -> None:
        if block == 2:
            raise OSError("the link is gone")
        real(self, block, source, slot)

    with monkeypatch.context() as patch:
        patch.setattr(HostSlots, "_copy", fail)
        with pytest.raises(OSError, match="the link is gone"):
            module(**given(1))
    again, found = step(module)
    assert torch.equal(again, loss)
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


def nodes(loss: torch.Tensor) -> list[Any]:
    """Every node of the graph behind a loss."""
    found: list[Any] = []
    todo: list[Any] = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.append(node)
            todo += [child for child, _ in node.next_functions]
    return found


def test_autograd_keeps_the_inputs_of_blocks_and_one_gradient(make_module: MakeModule) -> None:
    """Per block its (B, T, D) input; the loss's (B, T, D) gradient; the adapters themselves; nothing of a slot."""
    module = make_module()
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    loss = module(**given()).loss  # the graph lives as long as this does
    kept = [t for node in nodes(loss) for t in getattr(node, "saved_tensors", ())]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    sizes = {address: size for address, size in sizes.items() if address not in own}
    assert list(sizes.values()) == [BATCH * TOKENS * HIDDEN * FLOAT_BYTES] * (BLOCKS + 1)
    slots = module.get_base_model()._visits.slots
    assert not sizes.keys() & {buffer.untyped_storage().data_ptr() for buffer in slots.buffers}


def test_a_backward_copies_each_block_once_and_turns_around_on_what_is_there(make_module: MakeModule) -> None:
    module = make_module(num_slots=2)
    runner = module.get_base_model()._visits
    module(**given()).loss.backward()
    runner.slots.take_statistics()
    module(**given()).loss.backward()
    block_bytes = runner.model.store.block(0).numel()
    # Blocks 2 and 3 are in the slots at the turn-around, 0 and 1 at the next forward.
    assert runner.slots.take_statistics().h2d_bytes == 2 * (BLOCKS - 2) * block_bytes


def test_a_visit_is_a_node_of_its_own(make_module: MakeModule) -> None:
    loss = make_module()(**given()).loss
    assert {node.name() for node in nodes(loss)} == {
        f"{autograd.ChunkedLoss.__name__}Backward",
        f"{autograd.BlockVisit.__name__}Backward",
        "torch::autograd::AccumulateGrad",
    }
