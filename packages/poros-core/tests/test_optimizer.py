"""AdamW over the bank: the same as per-tensor AdamW, and resumable at any step of any schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from poros.bank import AdapterBank, AdapterSignature, make_signature
from poros.errors import ConfigError
from poros.optimizer import BankOptimizer
from poros.settings import SCHEDULES, OptimizerSettings

CPU = torch.device("cpu")
SIGNATURES = (
    make_signature([("a", (2, 5), (7, 2)), ("b", (3, 11), (1, 3))]),
    make_signature([("a", (8, 40), (50, 8))]),
)
# torch's CPU kernel rounds a tensor's last elements, those that fill no vector, in another way. None of these has any.
WHOLE_VECTORS = (
    make_signature([("a", (8, 40), (48, 8)), ("b", (8, 16), (24, 8))]),
    make_signature([("a", (16, 40), (50, 16))]),
)
NUM_STEPS = 10

# One reduction over a flat group against one per tensor: float32 rounding of a sum of a few hundred squares.
NORM_TOLERANCE = 1e-6

DECAY_STEPS = 4

WARMUPS = [
    (schedule, warmup) for schedule in SCHEDULES for warmup in (0, 3) if (schedule, warmup) != ("constant", 3)
]


def make_bank(signatures: Sequence[AdapterSignature] = SIGNATURES) -> AdapterBank:
    bank = AdapterBank(signatures, CPU)
    generator = torch.Generator().manual_seed(1)
    for _, _, view in bank.tensors(bank.weights):
        view.copy_(torch.randn(view.shape, generator=generator))
    return bank


def set_gradients(bank: AdapterBank, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for _, _, view in bank.tensors(bank.gradients):
        view.copy_(torch.randn(view.shape, generator=generator))


def settings(schedule: str = "cosine", warmup_steps: int = 2, **changes: Any) -> OptimizerSettings:
    usual = {"learning_rate": 1e-2, "weight_decay": 0.1, **changes}
    if schedule == "warmup_stable_decay":
        usual = {"decay_steps": DECAY_STEPS, **usual}
    return OptimizerSettings(schedule=schedule, warmup_steps=warmup_steps, **usual)


def stock_scheduler(
    schedule: str, optimizer: torch.optim.Optimizer, warmup: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return what Transformers itself makes."""
    decay = {"num_decay_steps": DECAY_STEPS} if schedule == "warmup_stable_decay" else None
    return get_scheduler(
        schedule,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=NUM_STEPS,
        scheduler_specific_kwargs=decay,
    )


def per_tensor(bank: AdapterBank, chosen: OptimizerSettings, num_steps: int) -> list[torch.Tensor]:
    """Train ordinary parameters, one per LoRA tensor, with torch's own loop; the gradients of ``bank`` are used."""
    parameters = [nn.Parameter(view.clone()) for _, _, view in bank.tensors(bank.weights)]
    ratios = {"lora_A": 1.0, "lora_B": chosen.lora_plus_ratio}
    optimizer = torch.optim.AdamW(
        [
            {"params": [parameter], "lr": chosen.learning_rate * ratios[tensor.group]}
            for parameter, (_, tensor, _) in zip(parameters, bank.tensors(bank.weights), strict=True)
        ],
        betas=(chosen.beta1, chosen.beta2),
        eps=chosen.eps,
        weight_decay=chosen.weight_decay,
        fused=True,
    )
    scheduler = stock_scheduler(chosen.schedule, optimizer, chosen.warmup_steps)
    for step in range(num_steps):
        set_gradients(bank, step)
        for parameter, (_, _, gradient) in zip(parameters, bank.tensors(bank.gradients), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        scheduler.step()
    return [p.detach() for p in parameters]


def train(bank: AdapterBank, optimizer: BankOptimizer, steps: range) -> list[float]:
    rates = []
    for step in steps:
        set_gradients(bank, step)
        rates.append(optimizer.learning_rate)
        optimizer.clip()
        optimizer.step()
    return rates


@pytest.mark.parametrize("ratio", [1.0, 16.0])
def test_one_call_per_group_gives_the_bits_of_one_call_per_tensor(ratio: float) -> None:
    chosen = settings(max_grad_norm=None, lora_plus_ratio=ratio)
    expected = per_tensor(make_bank(WHOLE_VECTORS), chosen, NUM_STEPS)
    bank = make_bank(WHOLE_VECTORS)
    train(bank, BankOptimizer(bank, chosen, NUM_STEPS), range(NUM_STEPS))
    found = [view for _, _, view in bank.tensors(bank.weights)]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_clipping_scales_by_the_norm_of_all_gradients(factor: float) -> None:
    bank = make_bank()
    set_gradients(bank, 0)
    norm = torch.cat([view.flatten() for _, _, view in bank.tensors(bank.gradients)]).norm()
    before = {g: t.clone() for g, t in bank.gradients.items()}
    found = BankOptimizer(bank, settings(max_grad_norm=float(norm) * factor), NUM_STEPS).clip()
    torch.testing.assert_close(found, norm, rtol=NORM_TOLERANCE, atol=0)
    for group, gradient in bank.gradients.items():
        torch.testing.assert_close(gradient, before[group] * min(1.0, factor), rtol=1e-5, atol=0)


def test_without_a_limit_gradients_keep_their_bits() -> None:
    bank = make_bank()
    set_gradients(bank, 0)
    before = {g: t.clone() for g, t in bank.gradients.items()}
    norm = BankOptimizer(bank, settings(max_grad_norm=None), NUM_STEPS).clip()
    assert norm > 0
    assert all(torch.equal(bank.gradients[group], before[group]) for group in before)


@pytest.mark.parametrize(("schedule", "warmup"), WARMUPS)
def test_the_rate_of_every_step_is_transformers_own(schedule: str, warmup: int) -> None:
    bank = make_bank()
    chosen = settings(schedule, warmup)
    rates = train(bank, BankOptimizer(bank, chosen, NUM_STEPS), range(NUM_STEPS))
    theirs = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=chosen.learning_rate)
    scheduler = stock_scheduler(schedule, theirs, warmup)
    expected = []
    for _ in range(NUM_STEPS):
        expected.append(theirs.param_groups[0]["lr"])
        theirs.step()
        scheduler.step()
    assert rates == expected


@pytest.mark.parametrize("done", [0, 1, 3, 7])
@pytest.mark.parametrize(("schedule", "warmup"), WARMUPS)
def test_a_restored_optimizer_continues_with_the_same_bits(schedule: str, warmup: int, done: int) -> None:
    chosen = settings(schedule, warmup)
    whole_bank = make_bank()
    rates = train(whole_bank, BankOptimizer(whole_bank, chosen, NUM_STEPS), range(NUM_STEPS))

    bank = make_bank()
    first = BankOptimizer(bank, chosen, NUM_STEPS)
    train(bank, first, range(done))
    saved = {name: tensor.clone() for name, tensor in first.state_tensors().items()}
    second = BankOptimizer(bank, chosen, NUM_STEPS)
    second.load_state(saved, done)
    assert train(bank, second, range(done, NUM_STEPS)) == rates[done:]
    assert all(torch.equal(bank.weights[g], whole_bank.weights[g]) for g in bank.weights)


def test_the_stable_phase_ends_where_the_decay_begins_and_the_rate_ends_near_zero() -> None:
    bank = make_bank()
    chosen = settings("warmup_stable_decay", 2, decay_steps=3)
    rates = train(bank, BankOptimizer(bank, chosen, NUM_STEPS), range(NUM_STEPS))
    peak = chosen.learning_rate
    assert rates[:8] == [0, peak / 2, *[peak] * 6]
    assert peak > rates[8] > rates[9] > 0


@pytest.mark.parametrize(
    "chosen",
    [
        settings("warmup_stable_decay", 7, decay_steps=4),
        settings("constant_with_warmup", 11),
        settings("cosine", 11),
    ],
    ids=lambda chosen: chosen.schedule,
)
def test_a_schedule_longer_than_the_run_is_refused(chosen: OptimizerSettings) -> None:
    got = f"`warmup_steps` {chosen.warmup_steps} and `decay_steps` {chosen.decay_steps}"
    with pytest.raises(ConfigError, match=rf"longer than the run: .* at most 10 .* got {got}"):
        BankOptimizer(make_bank(), chosen, NUM_STEPS)


def test_lora_plus_multiplies_the_rate_of_lora_b_alone() -> None:
    plain_bank, bank = make_bank(), make_bank()
    plain_rates = train(plain_bank, BankOptimizer(plain_bank, settings(), NUM_STEPS), range(NUM_STEPS))
    optimizer = BankOptimizer(bank, settings(lora_plus_ratio=4.0), NUM_STEPS)
    assert train(bank, optimizer, range(NUM_STEPS)) == plain_rates
    assert torch.equal(bank.weights["lora_A"], plain_bank.weights["lora_A"])
    assert not torch.equal(bank.weights["lora_B"], plain_bank.weights["lora_B"])


def test_a_restored_lora_plus_optimizer_continues_with_the_same_bits() -> None:
    chosen = settings(lora_plus_ratio=4.0)
    whole_bank, bank = make_bank(), make_bank()
    train(whole_bank, BankOptimizer(whole_bank, chosen, NUM_STEPS), range(NUM_STEPS))
    first = BankOptimizer(bank, chosen, NUM_STEPS)
    train(bank, first, range(5))
    second = BankOptimizer(bank, chosen, NUM_STEPS)
    second.load_state({name: tensor.clone() for name, tensor in first.state_tensors().items()}, 5)
    train(bank, second, range(5, NUM_STEPS))
    assert all(torch.equal(bank.weights[g], whole_bank.weights[g]) for g in bank.weights)


def test_the_step_is_the_same_on_any_number_of_threads() -> None:
    """A thread's share may end inside a vector; its scalar tail must round like the vector does."""
    signature = make_signature([("a", (64, 1000), (777, 64))])
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            bank = AdapterBank([signature], CPU)
            generator = torch.Generator().manual_seed(2)
            optimizer = BankOptimizer(bank, settings(max_grad_norm=None), NUM_STEPS)
            for buffer in (*bank.weights.values(), *bank.gradients.values()):
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
            optimizer.step()
            optimizer.step()
            results.append(bank.weights["lora_A"].clone())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
