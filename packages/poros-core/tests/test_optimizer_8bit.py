"""AdamW with 8-bit moments: bitsandbytes' bits over the flat bank, its own gates, checkpoints, refusals.

With ``--tier gpu`` all of it runs on the GPU, whose kernel is another one than the CPU's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import poros
from poros.bank import AdapterBank, make_signature
from poros.checkpoint import load_run_state, newest_complete
from poros.determinism import configure
from poros.errors import CheckpointError, ConfigError
from poros.interfaces import ParityCase
from poros.optimizer import MOMENTS, BankOptimizer
from poros.optimizer_8bit import KEYS
from poros.parity import gates
from poros.parity.case_run import start_case
from poros.planning.facts import model_facts
from poros.plugins import Registry
from poros.run.checkpointing import find_checkpoint, restore_state, save_state
from poros.settings import OptimizerSettings, Plan

Make = Callable[..., poros.Trainer]

# No tensor is a multiple of 256 elements, some are smaller than one block, one is above bitsandbytes' 4096.
SIGNATURES = (
    make_signature([("a", (2, 5), (7, 2)), ("b", (3, 111), (130, 3))]),
    make_signature([("a", (8, 40), (600, 8))]),
)
NUM_STEPS = 6
RATE = 1e-2
# Largest difference of any weight from torch's 32-bit AdamW after 6 steps, in units of the rate: 0.24
# (2026-11-30, x86-64 CPU, torch 2.15, bitsandbytes 0.50.2).
MAX_DISTANCE_IN_RATES = 0.5


@pytest.fixture(scope="module")
def device(tier: str) -> torch.device:
    chosen = torch.device("cuda" if tier == "gpu" else "cpu")
    configure(chosen)
    return chosen


def settings(**changes: Any) -> OptimizerSettings:
    return OptimizerSettings(
        **{
            "name": "adamw_8bit",
            "learning_rate": RATE,
            "weight_decay": 0.1,
            "schedule": "constant",
            **changes,
        }
    )


def make_bank(device: torch.device) -> AdapterBank:
    bank = AdapterBank(SIGNATURES, device)
    generator = torch.Generator().manual_seed(1)
    for _, _, view in bank.tensors(bank.weights):
        view.copy_(torch.randn(view.shape, generator=generator))
    return bank


def train(bank: AdapterBank, optimizer: BankOptimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for _, _, view in bank.tensors(bank.gradients):
            view.copy_(torch.randn(view.shape, generator=generator))
        optimizer.step()


def per_tensor(bank: AdapterBank, **options: Any) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Train with bitsandbytes' own optimizer, one parameter per LoRA tensor."""
    import bitsandbytes

    parameters = [nn.Parameter(view.clone()) for _, _, view in bank.tensors(bank.weights)]
    optimizer = bitsandbytes.optim.AdamW8bit(parameters, lr=RATE, weight_decay=0.1, **options)
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        optimizer.step()
    return parameters, optimizer


def same_weights(bank: AdapterBank, parameters: list[nn.Parameter]) -> bool:
    views = [view for _, _, view in bank.tensors(bank.weights)]
    return all(torch.equal(p.detach(), view) for p, view in zip(parameters, views, strict=True))


# ---- the update


def test_the_flat_bank_gives_the_bits_of_bitsandbytes_own_optimizer_per_tensor(device: torch.device) -> None:
    bank = make_bank(device)
    parameters, theirs = per_tensor(bank, min_8bit_size=0)
    ours = BankOptimizer(bank, settings(), NUM_STEPS)
    train(bank, ours, range(NUM_STEPS))
    assert same_weights(bank, parameters)
    for moment in ("exp_avg", "exp_avg_sq"):
        views = [view for _, _, view in bank.tensors(ours.moments(moment))]
        for parameter, view in zip(parameters, views, strict=True):
            assert torch.equal(theirs.state[parameter][KEYS[moment]], view)


def test_tensors_that_bitsandbytes_would_leave_in_32_bits_are_in_8(device: torch.device) -> None:
    bank = make_bank(device)
    parameters, theirs = per_tensor(bank)
    assert {theirs.state[p]["state1"].dtype for p in parameters} == {torch.float32, torch.uint8}
    ours = BankOptimizer(bank, settings(), NUM_STEPS)
    train(bank, ours, range(NUM_STEPS))
    assert {m.dtype for m in ours.moments("exp_avg").values()} == {torch.uint8}
    assert not same_weights(bank, parameters)


def test_the_update_is_near_that_of_32_bit_moments(device: torch.device) -> None:
    banks = {}
    for name in ("adamw", "adamw_8bit"):
        banks[name] = make_bank(device)
        train(banks[name], BankOptimizer(banks[name], settings(name=name), NUM_STEPS), range(NUM_STEPS))
    for group, weights in banks["adamw"].weights.items():
        distance = float((banks["adamw_8bit"].weights[group] - weights).abs().max())
        assert 0 < distance < MAX_DISTANCE_IN_RATES * RATE


@pytest.mark.gpu
def test_padding_stays_zero_where_the_kernel_has_a_code_for_zero(device: torch.device) -> None:
    bank = make_bank(device)
    train(bank, BankOptimizer(bank, settings(), NUM_STEPS), range(NUM_STEPS))
    used = {group: torch.zeros_like(weights, dtype=torch.bool) for group, weights in bank.weights.items()}
    for _, _, view in bank.tensors(used):
        view.fill_(True)
    for group, weights in bank.weights.items():
        assert not weights[~used[group]].any()


def test_moments_take_a_quarter_and_the_planner_knows(
    tiny_case: ParityCase, registry: Registry, device: torch.device
) -> None:
    case = replace(tiny_case, optimizer={"name": "adamw_8bit"})
    run = start_case(case, Plan(num_slots=2), registry, device)
    found = sum(t.nbytes for name in run.optimizer.quantities for t in run.optimizer.moments(name).values())
    assert found == model_facts(run.model.meta, run.model.numerics, "adamw_8bit").moment_bytes
    assert found < model_facts(run.model.meta, run.model.numerics).moment_bytes / 3.9
    run.close()


# ---- state


@pytest.mark.parametrize("done", [0, 1, 4])
def test_a_restored_optimizer_continues_with_the_same_bits(done: int, device: torch.device) -> None:
    chosen = settings(schedule="warmup_stable_decay", warmup_steps=1, decay_steps=3, lora_plus_ratio=4.0)
    whole, bank = make_bank(device), make_bank(device)
    train(whole, BankOptimizer(whole, chosen, NUM_STEPS), range(NUM_STEPS))
    first = BankOptimizer(bank, chosen, NUM_STEPS)
    train(bank, first, range(done))
    saved = {name: tensor.clone() for name, tensor in first.state_tensors().items()}
    second = BankOptimizer(bank, chosen, NUM_STEPS)
    second.load_state(saved, done)
    assert {n: t.tolist() for n, t in second.state_tensors().items()} == {
        n: t.tolist() for n, t in saved.items()
    }
    train(bank, second, range(done, NUM_STEPS))
    assert all(torch.equal(bank.weights[g], whole.weights[g]) for g in bank.weights)


class StopAfter(poros.Reporter):
    def __init__(self, step: int) -> None:
        self.step = step
        self.trainer: poros.Trainer | None = None

    def on_step(self, event: Any) -> None:
        if event.step == self.step and self.trainer is not None:
            self.trainer.request_stop()


def interrupted(make_trainer: Make, output: Path, step: int, **changes: Any) -> None:
    stop = StopAfter(step)
    with make_trainer(output, reporters=(stop,), **changes) as trainer:
        stop.trainer = trainer
        assert trainer.run().interrupted


def final_state(output: Path) -> dict[str, torch.Tensor]:
    path, _ = newest_complete(output)
    assert path is not None
    found = dict(load_run_state(path).tensors)
    return {name: tensor for name, tensor in found.items() if not name.startswith("generator")}


def test_a_resumed_run_is_the_uninterrupted_one(
    make_trainer: Make, tmp_path: Path, device: torch.device
) -> None:
    usual = {"device": str(device), "optimizer": settings()}
    with make_trainer(tmp_path / "whole", **usual) as trainer:
        trainer.run()
    interrupted(make_trainer, tmp_path / "parts", 5, **usual)
    with make_trainer(tmp_path / "parts", resume=True, **usual) as trainer:
        trainer.run()
    whole, parts = final_state(tmp_path / "whole"), final_state(tmp_path / "parts")
    assert {"optimizer.lora_B.exp_avg_absmax", "optimizer.lora_B.step"} <= whole.keys() == parts.keys()
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())


def test_a_run_is_not_continued_with_moments_of_another_kind(
    make_trainer: Make, tmp_path: Path, device: torch.device
) -> None:
    usual = {"device": str(device)}
    interrupted(make_trainer, tmp_path, 1, optimizer=settings(), **usual)
    with pytest.raises(ConfigError, match=r"optimizer\.name: adamw_8bit -> adamw"):
        make_trainer(tmp_path, resume=True, optimizer=settings(name="adamw"), **usual)


def test_moments_of_another_dtype_are_refused_by_the_checkpoint(
    tiny_case: ParityCase, registry: Registry, device: torch.device, tmp_path: Path
) -> None:
    """Where no fingerprint tells: uint8 codes have the shape of float32 moments. The step count shows it first."""
    run = start_case(replace(tiny_case, optimizer={"name": "adamw_8bit"}), Plan(), registry, device)
    save_state(tmp_path, 1, run.engine, run.optimizer, {})
    other = start_case(tiny_case, Plan(), registry, device)
    state, path, _ = find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"expected `optimizer\.lora_A\..*float32, got .* dtype"):
        restore_state(state, other.engine, other.optimizer, path)
    run.close()
    other.close()


# ---- gates


def eight_bit(case: ParityCase) -> ParityCase:
    """Return the case with 8-bit moments, one wide micro-batch and LoRA+."""
    optimizer = {"name": "adamw_8bit", "lora_plus_ratio": 4.0}
    return replace(case, name="tiny-8bit", num_steps=4, row_lengths=((5, 3), (4,)), optimizer=optimizer)


@pytest.fixture(scope="module")
def oracles(registry: Registry, device: torch.device) -> gates.Oracles:
    return gates.Oracles(registry, device)


@pytest.fixture(scope="module")
def half_trained(
    tiny_case: ParityCase, oracles: gates.Oracles, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("half")
    run = start_case(eight_bit(tiny_case), Plan(num_slots=2), oracles.registry, oracles.device)
    run.train(2)
    save_state(folder, 2, run.engine, run.optimizer, {})
    run.close()
    return folder


def test_streaming_changes_no_bit_of_the_resident_run(tiny_case: ParityCase, oracles: gates.Oracles) -> None:
    plans = (gates.STREAMED_PLANS[1], gates.STREAMED_PLANS[3])
    for verdict in gates.residency(eight_bit(tiny_case), oracles, plans):
        assert verdict.outcome == "equal", verdict.detail


def test_codes_and_scales_are_compared(tiny_case: ParityCase, oracles: gates.Oracles) -> None:
    recorded = oracles.train(eight_bit(tiny_case)).tensors
    assert recorded["3/exp_avg/lora_A"].dtype == recorded["3/exp_avg_sq/lora_B"].dtype == torch.uint8
    assert {f"3/{moment}_absmax/lora_B" for moment in MOMENTS} <= recorded.keys()


@pytest.mark.parametrize("dropped", [None, *KEYS])
def test_a_run_continued_under_another_plan_equals_the_uninterrupted_one(
    tiny_case: ParityCase, oracles: gates.Oracles, half_trained: Path, dropped: str | None
) -> None:
    verdict = gates.restart(eight_bit(tiny_case), oracles, half_trained, dropped=dropped)
    assert verdict.outcome == ("equal" if dropped is None else "different"), verdict


def test_a_difference_in_an_absmax_is_named_by_its_elements(
    tiny_case: ParityCase, oracles: gates.Oracles
) -> None:
    case = eight_bit(tiny_case)
    other = oracles.train(case)
    other.tensors["1/exp_avg_absmax/lora_B"][2] += 1
    detail = oracles.compare(case, other).detail
    expected = "step 1, exp_avg_absmax, the 256 elements from block 0, tensor self_attn.v_proj.lora_B, index [0, 0] on"
    assert expected in detail


# ---- refusals


@pytest.mark.filterwarnings("ignore:EXPERIMENTAL")
def test_a_machine_without_bitsandbytes_is_told_what_to_install(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"a working bitsandbytes, got .*`uv add poros-quant`"):
        make_trainer(tmp_path, optimizer=settings(), quantization="bf16_bitwise")


def test_a_bank_with_more_elements_than_the_kernel_counts_is_refused(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poros.optimizer_8bit.MAX_ELEMENTS", 100)
    with pytest.raises(ConfigError, match=r"at most 100 elements in a group .*, got \d+"):
        BankOptimizer(make_bank(device), settings(), NUM_STEPS)
