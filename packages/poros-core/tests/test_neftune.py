"""NEFTune: Transformers' noise, the same under every plan and after every resume, and none in an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.neftune import neftune_post_forward_hook

import poros
from poros.checkpoint import load_run_state, newest_complete
from poros.determinism import configure, embedding_seed, visit_seed
from poros.engine import engine as engine_module
from poros.engine.noise import add_embedding_noise
from poros.interfaces import ParityCase
from poros.parity import gates
from poros.parity.case_run import CaseRun
from poros.parity.compare import compare
from poros.parity.plain import train_plain
from poros.plugins import Registry
from poros.settings import ACCUMULATION_ORDERS, Plan

StartRun = Callable[..., CaseRun]
ALPHA = 5.0
PLANS = [
    Plan(residency="resident"),
    Plan(num_slots=2, activations="host"),
    Plan(num_slots=3, order=ACCUMULATION_ORDERS[1], workspace=True),
    Plan(num_slots=2, resident_blocks=3, kept_blocks=3),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_noise_is_transformers_own(dtype: torch.dtype) -> None:
    embedding = nn.Embedding(11, 24, dtype=dtype)
    embedding.neftune_noise_alpha = ALPHA
    ids = torch.arange(10).view(2, 5)
    clean = embedding(ids).detach()
    torch.manual_seed(7)
    expected = neftune_post_forward_hook(embedding, (ids,), clean)
    found = clean.clone()
    add_embedding_noise(found, ALPHA, 7)
    assert torch.equal(found, expected)
    assert not torch.equal(found, clean)


def test_it_is_off_by_default(start_run: StartRun) -> None:
    off, zero = start_run(), start_run(neftune_alpha=0.0)
    assert compare(off.train(1), zero.train(1)).outcome == "equal"
    on = start_run(neftune_alpha=ALPHA)
    assert compare(off.trajectory, on.train(1)).outcome == "different"


@pytest.mark.parametrize("plan", PLANS, ids=["resident", "host-activations", "micro-batch-major", "kept"])
def test_no_plan_changes_a_bit_and_ordinary_autograd_sees_the_same_noise(
    plan: Plan, start_run: StartRun
) -> None:
    changes = {"neftune_alpha": ALPHA, "lora": {"rank": 2, "dropout": 0.3}}
    oracle = start_run(PLANS[0], **changes)
    train_plain(oracle, 2)
    verdict = compare(oracle.trajectory, start_run(plan, **changes).train(2))
    assert verdict.outcome == "equal", verdict.detail


@pytest.mark.gpu
def test_no_plan_changes_a_bit_on_a_gpu(tiny_case: ParityCase, registry: Registry) -> None:
    device = torch.device("cuda")
    configure(device)
    case = replace(tiny_case, name="tiny-neftune", neftune_alpha=ALPHA, lora={"rank": 2, "dropout": 0.3})
    oracles = gates.Oracles(registry, device)
    for verdict in (*gates.residency(case, oracles), gates.plain(case, oracles)):
        assert verdict.outcome == "equal", verdict.detail


def test_every_step_and_micro_batch_draws_its_own_once(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = []

    def note(hidden: torch.Tensor, alpha: float, seed: int) -> None:
        seeds.append(seed)
        add_embedding_noise(hidden, alpha, seed)

    monkeypatch.setattr(engine_module, "add_embedding_noise", note)
    start_run(neftune_alpha=ALPHA).train(2)
    assert len(set(seeds)) == len(seeds) == 2 * 3


def test_its_seeds_are_none_of_a_visit() -> None:
    visits = {
        visit_seed(0, step, micro, block) for step in range(9) for micro in range(9) for block in range(9)
    }
    own = {embedding_seed(0, step, micro) for step in range(9) for micro in range(9)}
    assert len(own) == 81
    assert not own & visits


def test_an_evaluation_is_without_noise_and_a_step_leaves_the_default_generator(start_run: StartRun) -> None:
    clean, noisy = start_run(), start_run(neftune_alpha=ALPHA)
    assert clean.engine.evaluate(clean.micro_batches(0)) == noisy.engine.evaluate(noisy.micro_batches(0))
    state = torch.get_rng_state()
    noisy.train(1)
    assert torch.equal(torch.get_rng_state(), state)


class StopAfter(poros.Reporter):
    def __init__(self, step: int) -> None:
        self.step = step
        self.trainer: poros.Trainer | None = None

    def on_step(self, event: Any) -> None:
        if event.step == self.step and self.trainer is not None:
            self.trainer.request_stop()


def weights(output: Path) -> dict[str, torch.Tensor]:
    path, _ = newest_complete(output)
    assert path is not None
    found = load_run_state(path).tensors
    return {name: tensor for name, tensor in found.items() if not name.startswith("generator")}


def test_a_resumed_run_is_the_uninterrupted_one_and_another_alpha_is_listed(
    make_trainer: Callable[..., poros.Trainer], make_steps: Any, tmp_path: Path
) -> None:
    usual = {"numerics": poros.Numerics(neftune_alpha=ALPHA), "steps": make_steps(epochs=1)}
    with make_trainer(tmp_path / "whole", **usual) as trainer:
        trainer.run()
    stop = StopAfter(3)
    with make_trainer(tmp_path / "parts", reporters=(stop,), **usual) as trainer:
        stop.trainer = trainer
        trainer.run()
    with make_trainer(tmp_path / "parts", resume=True, steps=usual["steps"]) as trainer:
        assert any("numerics.neftune_alpha: 5.0 -> 0.0" in note for note in trainer.notes)
    with make_trainer(tmp_path / "parts", resume=True, **usual) as trainer:
        trainer.run()
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())
