"""The sides of `poros verify`, in this process: what is recorded, what is compared, what a fault leads to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import poros
from poros.errors import ConfigError, NonFiniteError
from poros.parity.compare import Verdict
from poros.plugins import Registry
from poros.run.fingerprint import flatten
from poros.settings import Plan
from poros.verify.controls import CONTROLS, PARTS, choose_controls
from poros.verify.depth import cut_depth
from poros.verify.judge import judge
from poros.verify.rows import RandomSteps, open_any
from poros.verify.side import SideSpec, Subject, control_plan, plan_for_blocks, run_side

STEPS = 3
CPU_PARTS = [name for control in CONTROLS.values() if not control.needs_gpu for name in control.parts]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of five blocks, and no weights."""
    from transformers import Qwen2Config

    folder = tmp_path_factory.mktemp("five") / "blocks"
    config = Qwen2Config(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        architectures=["Qwen2ForCausalLM"],
    )
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def subject(model_folder: Path, registry: Registry, cpu: torch.device) -> Subject:
    numerics = poros.Numerics(compute_dtype=torch.float32, length_bucket=4)
    model, own = open_any(
        str(model_folder),
        quantization="nf4",
        lora=poros.LoraSettings(rank=4, dropout=0.2),
        numerics=numerics,
        registry=registry,
        device=cpu,
    )
    assert not own
    steps = RandomSteps(
        vocab_size=48,
        num_steps=20,
        micro_batches=2,
        micro_batch_size=1,
        max_length=9,
        length_bucket=4,
        seed=3,
    )
    settings = poros.RunSettings(
        output="unused", device="cpu", optimizer=poros.OptimizerSettings(learning_rate=1e-2)
    )
    return Subject(model=model, steps=steps, settings=settings, registry=registry)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sides")


@pytest.fixture(scope="module")
def streamed(subject: Subject, folder: Path) -> dict[str, Any]:
    return run_side(SideSpec(name="streamed", steps=STEPS), subject, folder)


@pytest.fixture(scope="module")
def stopped(subject: Subject, folder: Path, streamed: dict[str, Any]) -> dict[str, Any]:
    spec = SideSpec(name="stopped", steps=1, plan=streamed["plan"], keep_checkpoint=True)
    return run_side(spec, subject, folder)


def test_a_side_streams_and_leaves_one_hash_per_step(streamed: dict[str, Any]) -> None:
    assert streamed["failure"] is None
    assert streamed["plan"]["residency"] == "streamed"
    assert streamed["num_blocks"] == streamed["whole_num_blocks"] == 5
    assert len(set(streamed["steps"].values())) == STEPS
    assert streamed["h2d_bytes"] > 0


def test_the_resident_side_is_equal_in_every_recorded_tensor(
    subject: Subject, folder: Path, streamed: dict[str, Any]
) -> None:
    resident = run_side(SideSpec(name="resident", residency="resident", steps=STEPS), subject, folder)
    assert resident["h2d_bytes"] == 0
    verdict = judge(folder, resident, streamed, first=0, last=STEPS)
    # rows, losses, norm, rng and position; gradients, weights and two moments of two groups
    assert verdict == Verdict("equal", "", STEPS * (5 + 4 * 2))
    assert resident["steps"] == streamed["steps"]


def test_a_resumed_side_is_equal_from_the_step_on_at_which_it_resumes(
    subject: Subject, folder: Path, streamed: dict[str, Any], stopped: dict[str, Any]
) -> None:
    spec = SideSpec(name="resumed", steps=STEPS, plan=streamed["plan"], resume_from="stopped")
    resumed = run_side(spec, subject, folder)
    assert list(stopped["steps"]) == ["0"]
    assert list(resumed["steps"]) == ["1", "2"]
    assert judge(folder, streamed, resumed, first=1, last=STEPS).outcome == "equal"


@pytest.mark.parametrize("part", CPU_PARTS)
def test_every_fault_that_needs_no_gpu_leads_to_what_is_expected_of_it(
    part: str, subject: Subject, folder: Path, streamed: dict[str, Any], stopped: dict[str, Any]
) -> None:
    resumed = PARTS[part].make_engine is None
    spec = SideSpec(
        name=part,
        steps=STEPS,
        plan=streamed["plan"] if resumed else control_plan(streamed["plan"]),
        part=part,
        resume_from=stopped["name"] if resumed else None,
    )
    side = run_side(spec, subject, folder)
    verdict = judge(folder, streamed, side, first=1 if resumed else 0, last=STEPS)
    assert verdict.outcome == PARTS[part].expected, verdict.detail
    assert (verdict.difference is None) == (verdict.outcome == "equal")
    if resumed:
        assert verdict.difference is not None
        assert (verdict.difference.step, verdict.difference.quantity) == (1, "weights")
        assert verdict.difference.tensor is not None


def test_late_copies_that_are_waited_for_are_equal(
    subject: Subject, folder: Path, streamed: dict[str, Any]
) -> None:
    spec = SideSpec(name="late", steps=STEPS, plan=control_plan(streamed["plan"]), part="late-copies")
    assert judge(folder, streamed, run_side(spec, subject, folder), first=0, last=STEPS).outcome == "equal"


def test_a_resident_side_that_does_not_fit_runs_the_first_half_of_the_blocks(
    subject: Subject, folder: Path, streamed: dict[str, Any], tmp_path: Path
) -> None:
    two = run_side(SideSpec(name="two", residency="resident", steps=1, num_blocks=2), subject, tmp_path)
    spec = SideSpec(name="half", residency="resident", steps=1, resident_bytes=two["predicted_device_bytes"])
    half = run_side(spec, subject, tmp_path)
    assert (half["num_blocks"], half["whole_num_blocks"]) == (2, 5)
    plan = plan_for_blocks(streamed["plan"], 2, 5)
    cut = run_side(SideSpec(name="cut", steps=1, plan=plan, num_blocks=2), subject, tmp_path)
    assert judge(tmp_path, half, cut, first=0, last=1).outcome == "equal"


def test_a_side_without_memory_says_so_and_cannot_be_compared(
    subject: Subject, streamed: dict[str, Any], tmp_path: Path
) -> None:
    spec = SideSpec(name="tight", residency="resident", steps=1, resident_bytes=1000)
    side = run_side(spec, subject, tmp_path)
    assert side["out_of_memory"]
    verdict = judge(tmp_path, streamed, side, first=0, last=1)
    assert verdict.outcome == "cannot compare"
    assert verdict.detail.startswith("the side `tight` ran out of memory: Not enough device memory")


def test_other_versions_or_kernels_cannot_be_compared(folder: Path, streamed: dict[str, Any]) -> None:
    other = {**streamed, "environment": {**streamed["environment"], "device": "another"}}
    verdict = judge(folder, streamed, other, first=0, last=STEPS)
    assert verdict.outcome == "cannot compare"
    assert "device: CPU against another" in verdict.detail


def test_a_side_that_ended_early_without_a_difference_cannot_be_compared(
    folder: Path, streamed: dict[str, Any], stopped: dict[str, Any]
) -> None:
    ended = {**stopped, "failure": "pulled the plug"}
    verdict = judge(folder, streamed, ended, first=0, last=STEPS)
    assert verdict.outcome == "cannot compare"
    assert verdict.detail == "the side `stopped` ended in step 2: pulled the plug"


def test_two_sides_that_end_in_the_same_way_in_the_last_step_cannot_be_compared(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflowed(*_arguments: object, **_named: object) -> None:
        raise NonFiniteError("the norm is infinite")

    monkeypatch.setattr("poros.run.trainer.check_step_finite", overflowed)
    sides = [run_side(SideSpec(name=name, steps=1), subject, tmp_path) for name in ("one", "other")]
    assert all((tmp_path / side["name"] / "step-000000.safetensors").exists() for side in sides)
    verdict = judge(tmp_path, *sides, first=0, last=1)
    assert verdict.outcome == "cannot compare"
    assert verdict.detail == "the side `one` ended in step 1: the norm is infinite"


def test_a_side_that_fails_after_its_last_step_cannot_be_compared(
    folder: Path, streamed: dict[str, Any]
) -> None:
    failed = {**streamed, "failure": "the disk is full"}
    verdict = judge(folder, streamed, failed, first=0, last=STEPS)
    assert verdict.outcome == "cannot compare"
    assert verdict.detail == "the side `streamed` failed after its last step: the disk is full"


def test_fewer_blocks_keep_their_weights_and_lose_the_adapters_of_the_others(
    make_trainer: Callable[..., poros.Trainer], tmp_path: Path, registry: Registry
) -> None:
    with make_trainer(tmp_path / "run", lora=poros.LoraSettings(rank=2, blocks=(0, 1))) as trainer:
        model = trainer.model
    cut = cut_depth(model, 1, registry)
    assert len(cut.meta.blocks) == 1
    assert cut.lora.blocks == (0,)
    name = "model.layers.0.mlp.up_proj.weight"
    device = torch.device("cpu")
    assert torch.equal(cut.source.load(name, device), model.source.load(name, device))


def test_a_run_starts_with_the_generator_that_its_seed_gives(
    make_trainer: Callable[..., poros.Trainer], tmp_path: Path
) -> None:
    states = []
    for number in range(2):
        torch.seed()
        with make_trainer(tmp_path / str(number)) as trainer:
            trainer.load()
            states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_random_rows_are_the_same_for_a_step_whenever_it_is_asked_for() -> None:
    steps = RandomSteps(
        vocab_size=40,
        num_steps=9,
        micro_batches=2,
        micro_batch_size=2,
        max_length=11,
        length_bucket=4,
        seed=1,
    )
    again = steps.step(7)
    assert all(
        torch.equal(a.input_ids, b.input_ids) and torch.equal(a.labels, b.labels)
        for a, b in zip(steps.step(7), again, strict=True)
    )
    assert again[0].input_ids.shape == (2, 12)
    assert not torch.equal(again[0].input_ids, steps.step(6)[0].input_ids)


def test_plans_of_faults_and_of_fewer_blocks_are_legal_whatever_the_run_s_own_plan_keeps() -> None:
    plan = flatten(Plan(num_slots=4, resident_blocks=6, kept_blocks=6, workspace=True))
    broken = Plan(**control_plan(plan))
    assert broken == Plan(num_slots=2, workspace=True)
    assert Plan(**plan_for_blocks(plan, 2, 10)) == Plan(
        num_slots=4, resident_blocks=1, kept_blocks=1, workspace=True
    )


def test_a_run_whose_own_plan_is_resident_streams_to_be_compared_and_says_so(
    subject: Subject, tmp_path: Path
) -> None:
    whole = Plan(residency="resident", kept_blocks=5)
    kept = replace(subject, settings=replace(subject.settings, plan=whole))
    side = run_side(SideSpec(name="streamed", steps=1), kept, tmp_path)
    assert side["failure"] is None
    assert side["plan"]["residency"] == "streamed"
    assert "keeps every block on the device" in side["plan_changed"]
    assert (side["plan"]["resident_blocks"], side["plan"]["kept_blocks"]) == (0, 0)


def test_faults_are_chosen_by_name_once_and_unknown_ones_are_refused() -> None:
    assert [c.name for c in choose_controls(("poisoned-slot", "early-refill", "early-refill"))] == [
        "early-refill",
        "poisoned-slot",
    ]
    assert choose_controls(("all",)) == tuple(CONTROLS.values())
    with pytest.raises(ConfigError, match=r"Unknown fault: expected early-refill, .* got `x`"):
        choose_controls(("x",))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, control in CONTROLS.items() if control.needs_gpu])
def test_unfavourable_timing_on_streams_changes_nothing_until_a_wait_is_missing(
    name: str, subject: Subject, tmp_path: Path
) -> None:
    on_gpu = replace(subject, settings=replace(subject.settings, device="cuda"))
    trusted = run_side(SideSpec(name="trusted", steps=STEPS), on_gpu, tmp_path)
    for part in CONTROLS[name].parts:
        plan = control_plan(trusted["plan"])
        side = run_side(SideSpec(name=part, steps=STEPS, plan=plan, part=part), on_gpu, tmp_path)
        verdict = judge(tmp_path, trusted, side, first=0, last=STEPS)
        assert verdict.outcome == PARTS[part].expected, f"{part}: {verdict.detail}"
