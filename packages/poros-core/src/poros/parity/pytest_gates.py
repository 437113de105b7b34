"""The parity gates as pytest tests: a subclass per architecture in an adapter package's ``tests/test_parity.py``.

    class TestQwen2(ParityGates):
        architecture = "qwen2"
        all_cases = PARITY_CASES

Needs the ``tier`` fixture (``cpu`` or ``gpu``); tests marked ``gpu`` need a CUDA device. Importing this module needs
pytest, which Poros does not require at run time: only tests import it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from poros.determinism import configure
from poros.errors import UserError
from poros.interfaces import ParityCase
from poros.parity import gates
from poros.parity.case_run import RandomBatch, start_case
from poros.parity.faults import FAULTS, GRAPH_FAULTS, EngineMaker, delayed_copies, poison_before_refill
from poros.parity.module import module_against_engine, module_residency
from poros.parity.packing import PACKING_TOLERANCE, packed_and_alone, packing_differences
from poros.plugins import load_registry
from poros.settings import ACCUMULATION_ORDERS, Plan

__all__ = ["ParityGates"]

# Largest differences from the unpatched loop over 5 steps of the tiny cases, measured 2026-11-30 on an x86-64 CPU
# (AVX2, torch 2.15, transformers 5.24, peft 0.21.2): float32 loss 4.8e-7, weights 3e-8; bfloat16 loss 9e-4, first
# gradients' cosine 0.9990. The float32 bound is the contract's 1e-5; in bfloat16 the head's chunks round by
# themselves, and a first-step loss difference of about 2.6e-3 is normal between implementations.
FLOAT32_TOLERANCE = 1e-5
BFLOAT16_LOSS_TOLERANCE = 2.6e-3
MIN_GRADIENT_COSINE = 0.999
# Against gradients in float32 the worst tensor of Poros has 0.9994, of PEFT 0.9992 (four tiny cases, same machine).
# They round in different places, so their errors add up. 0.9989 was found with torch 2.11 and Transformers 5.17.
BFLOAT16_GRADIENT_COSINE = 0.998

# A fault shows in the first step; the second shows that it does not heal.
NUM_CONTROL_STEPS = 2

CaseFolder = Callable[[ParityCase], Path]


class ParityGates:
    """Every gate on every tiny case of one architecture.

    Attributes:
        architecture: registry name; cases of others are left out.
        all_cases: the package's parity cases.
        repeated: endings of the names of cases that also go through the cache, evaluations and unfavourable timing.
        respawned: the same for the gates that start processes; each of them imports everything anew.
        bfloat16_gradient_cosine: smallest cosine of a first gradient with the unpatched loop's in 16 bits.
        compiled_on_cpu: whether the CPU tier compiles blocks too; it takes half a minute for each block kind.
    """

    architecture: ClassVar[str]
    all_cases: ClassVar[Sequence[ParityCase]]
    repeated: ClassVar[tuple[str, ...]] = ("-nf4-float32", "-nf4-sparse-dropout")
    respawned: ClassVar[tuple[str, ...]] = ("-nf4-sparse-dropout",)
    bfloat16_gradient_cosine: ClassVar[float] = BFLOAT16_GRADIENT_COSINE
    bfloat16_loss_tolerance: ClassVar[float] = BFLOAT16_LOSS_TOLERANCE
    compiled_on_cpu: ClassVar[bool] = False

    @classmethod
    def cases(cls) -> list[ParityCase]:
        """Return the architecture's cases."""
        return [case for case in cls.all_cases if case.architecture == cls.architecture]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give ``case`` every case, ``repeated_case``, ``float32_case`` and ``compiled_case`` the ones they name."""
        cases = self.cases()
        respawned = [case for case in cases if case.name.endswith(self.respawned)]
        chosen = {
            "case": cases,
            "repeated_case": [case for case in cases if case.name.endswith(self.repeated)],
            "respawned_case": respawned,
            "resumed_case": respawned[:1],
            "float32_case": [case for case in cases if case.compute_dtype == torch.float32],
        }
        for name in chosen.keys() & set(metafunc.fixturenames):
            metafunc.parametrize(name, chosen[name], ids=lambda case: case.name)
        if "compiled_case" in metafunc.fixturenames:
            marks = [] if self.compiled_on_cpu else [pytest.mark.gpu]
            metafunc.parametrize(
                "compiled_case", [pytest.param(_compiled(cases[0]), marks=marks)], ids=["one-shape"]
            )

    @pytest.fixture(scope="class")
    @classmethod
    def device(cls, tier: str) -> torch.device:
        chosen = torch.device("cuda" if tier == "gpu" else "cpu")
        configure(chosen)
        return chosen

    @pytest.fixture(scope="class")
    @classmethod
    def oracles(cls, device: torch.device) -> gates.Oracles:
        return gates.Oracles(load_registry(), device)

    @pytest.fixture(scope="class")
    @classmethod
    def half_trained(cls, device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> CaseFolder:
        """Return the checkpoint folder of a case's first half, trained once in a process of its own."""

        @functools.cache
        def folder_of(name: str) -> Path:
            folder = tmp_path_factory.mktemp(name)
            gates.save_half(next(case for case in cls.cases() if case.name == name), device, folder)
            return folder

        return lambda case: folder_of(case.name)

    def test_streaming_changes_no_bit_of_the_resident_run(
        self, case: ParityCase, oracles: gates.Oracles
    ) -> None:
        for verdict in gates.residency(case, oracles):
            assert verdict.outcome == "equal", verdict.detail

    def test_streaming_changes_no_bit_where_blocks_are_compiled(
        self, compiled_case: ParityCase, oracles: gates.Oracles
    ) -> None:
        for verdict in gates.residency(compiled_case, oracles, gates.STREAMED_PLANS[1:3]):
            assert verdict.outcome == "equal", verdict.detail

    def test_a_store_read_from_the_cache_changes_no_bit(
        self, repeated_case: ParityCase, oracles: gates.Oracles, tmp_path: Path
    ) -> None:
        verdict = gates.cached_store(repeated_case, oracles, tmp_path)
        assert verdict.outcome == "equal", verdict.detail

    def test_blocks_from_the_disk_change_no_bit(
        self, repeated_case: ParityCase, oracles: gates.Oracles, tmp_path: Path
    ) -> None:
        for verdict in gates.disk_tier(repeated_case, oracles, tmp_path):
            assert verdict.outcome == "equal", verdict.detail

    def test_the_engine_equals_ordinary_autograd(self, case: ParityCase, oracles: gates.Oracles) -> None:
        verdict = gates.plain(case, oracles)
        assert verdict.outcome == "equal", verdict.detail

    def test_the_module_under_autograd_equals_the_engine(
        self, case: ParityCase, oracles: gates.Oracles
    ) -> None:
        verdict = module_against_engine(case, oracles.registry, oracles.device)
        assert verdict.outcome == "equal", verdict.detail

    def test_streaming_changes_no_bit_of_the_module(
        self, repeated_case: ParityCase, oracles: gates.Oracles
    ) -> None:
        plan = Plan(num_slots=3, resident_blocks=1, workspace=True)
        verdict = module_residency(
            repeated_case, oracles.registry, oracles.device, plan, num_steps=NUM_CONTROL_STEPS
        )
        assert verdict.outcome == "equal", verdict.detail

    def test_a_fresh_process_repeats_the_run(
        self, respawned_case: ParityCase, device: torch.device, tmp_path: Path
    ) -> None:
        verdict = gates.repeatability(respawned_case, device, tmp_path)
        assert verdict.outcome == "equal", verdict.detail

    def test_a_run_continued_under_another_plan_equals_the_uninterrupted_one(
        self, respawned_case: ParityCase, oracles: gates.Oracles, half_trained: CaseFolder
    ) -> None:
        verdict = gates.restart(respawned_case, oracles, half_trained(respawned_case))
        assert verdict.outcome == "equal", verdict.detail

    @pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
    def test_a_resume_that_drops_a_moment_is_caught(
        self, resumed_case: ParityCase, moment: str, oracles: gates.Oracles, half_trained: CaseFolder
    ) -> None:
        verdict = gates.restart(resumed_case, oracles, half_trained(resumed_case), dropped=moment)
        assert verdict.outcome == "different", f"{moment}: {verdict}"
        assert "weights" in verdict.detail or moment in verdict.detail, verdict.detail

    def test_evaluations_between_steps_change_no_bit(
        self, repeated_case: ParityCase, oracles: gates.Oracles
    ) -> None:
        verdict = gates.evaluation(repeated_case, oracles)
        assert verdict.outcome == "equal", verdict.detail

    def test_the_unpatched_transformers_and_peft_loop_agrees(
        self, case: ParityCase, oracles: gates.Oracles
    ) -> None:
        if case.lora.get("dropout"):
            # Dropout masks of two implementations cannot agree; everything else of the case stays.
            case = replace(case, lora={**case.lora, "dropout": 0.0})
        found = gates.reference(case, oracles.registry, oracles.device)
        exact = case.compute_dtype == torch.float32
        assert found.max_loss_difference <= (FLOAT32_TOLERANCE if exact else self.bfloat16_loss_tolerance), (
            found
        )
        assert found.first_gradient_cosine > (
            MIN_GRADIENT_COSINE if exact else self.bfloat16_gradient_cosine
        ), found
        if exact:
            assert found.min_gradient_cosine > MIN_GRADIENT_COSINE, found
            assert found.max_weight_difference <= FLOAT32_TOLERANCE, found

    def test_samples_of_a_packed_row_do_not_see_each_other(
        self, float32_case: ParityCase, oracles: gates.Oracles
    ) -> None:
        """The loss of a packed row is the sum of its samples', its gradients too; a family that leaks refuses it."""
        case = replace(float32_case, lora={**float32_case.lora, "dropout": 0.0})
        run = start_case(case, Plan(num_slots=2), oracles.registry, oracles.device)
        packed, alone = packed_and_alone(int(run.model.config.vocab_size))
        try:
            if run.model.architecture.packs_rows:
                assert max(packing_differences(run, packed, alone)) <= PACKING_TOLERANCE
                one_row = RandomBatch(packed.input_ids, packed.labels)
                assert min(packing_differences(run, one_row, alone)) > PACKING_TOLERANCE, (
                    "the gate cannot fail"
                )
            else:
                with pytest.raises(UserError, match=f"Cannot train on packed rows: .*`{self.architecture}`"):
                    run.engine.step([packed], 0)
        finally:
            run.close()

    @pytest.mark.parametrize(
        "make_engine", [delayed_copies, poison_before_refill], ids=["delayed", "poisoned"]
    )
    def test_the_least_favourable_timing_changes_no_bit(
        self, repeated_case: ParityCase, make_engine: EngineMaker, oracles: gates.Oracles
    ) -> None:
        case = replace(repeated_case, num_steps=NUM_CONTROL_STEPS)
        plans = [Plan(num_slots=2), Plan(num_slots=2, order=ACCUMULATION_ORDERS[1])]
        for verdict in gates.residency(case, oracles, plans, make_engine):
            assert verdict.outcome == "equal", verdict.detail

    @pytest.mark.parametrize("fault", FAULTS)
    def test_an_injected_fault_is_caught(
        self, float32_case: ParityCase, fault: str, oracles: gates.Oracles
    ) -> None:
        case = replace(float32_case, num_steps=NUM_CONTROL_STEPS)
        (verdict,) = gates.residency(case, oracles, [Plan(num_slots=2)], FAULTS[fault])
        assert verdict.outcome == "different", f"{fault}: {verdict}"
        # A refill between recompute and backward is the silent one: the loss of the step is still right.
        if fault == "early-refill":
            assert verdict.detail.startswith("first difference at step 0, gradients"), verdict.detail

    @pytest.mark.gpu
    @pytest.mark.parametrize("fault", GRAPH_FAULTS)
    def test_a_fault_of_captured_graphs_is_caught(
        self, float32_case: ParityCase, fault: str, oracles: gates.Oracles
    ) -> None:
        case = replace(float32_case, num_steps=NUM_CONTROL_STEPS)
        (verdict,) = gates.residency(case, oracles, [Plan(num_slots=2)], GRAPH_FAULTS[fault])
        assert verdict.outcome == "different", f"{fault}: {verdict}"

    @pytest.mark.gpu
    def test_graphs_change_no_bit_of_the_eager_resident_run(
        self, case: ParityCase, oracles: gates.Oracles
    ) -> None:
        eager = oracles.train(case, Plan(residency="resident", graphs=False))
        verdict = oracles.compare(case, eager)
        assert verdict.outcome == "equal", verdict.detail


def _compiled(case: ParityCase) -> ParityCase:
    """Return the case with compiled blocks, dropout and one shape: every kind is compiled once per shape."""
    return replace(
        case,
        name=f"{case.name}-compiled",
        blocks="compiled",
        lora={"rank": 4, "dropout": 0.3},
        row_lengths=((8,), (6,)),
        length_bucket=8,
        num_steps=NUM_CONTROL_STEPS,
    )
