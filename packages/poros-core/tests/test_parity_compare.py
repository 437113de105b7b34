"""The comparison behind every gate: byte for byte, and it says where."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from poros.bank import make_signature
from poros.parity.case_run import CaseRun
from poros.parity.compare import bitwise_equal, compare
from poros.parity.trajectory import Trajectory

SIGNATURES = (
    make_signature([("self_attn.q_proj", (2, 5), (7, 2))]),
    make_signature([("mlp.up_proj", (3, 4), (6, 3)), ("mlp.down_proj", (2, 6), (4, 2))]),
)
SIZES = {group: sum(s.row_size(group) for s in SIGNATURES) for group in ("lora_A", "lora_B")}


def trajectory(num_steps: int = 2) -> Trajectory:
    tensors = {}
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        tensors[f"{step}/losses"] = torch.rand(3, generator=generator)
        tensors[f"{step}/grad_norm"] = torch.rand((), generator=generator)
        tensors[f"{step}/rng"] = torch.arange(16, dtype=torch.uint8)
        tensors[f"{step}/position"] = torch.tensor(step + 1)
        for quantity in ("gradients", "weights", "exp_avg", "exp_avg_sq"):
            for group, size in SIZES.items():
                tensors[f"{step}/{quantity}/{group}"] = torch.rand(size, generator=generator)
    return Trajectory(SIGNATURES, tensors)


# ---- one tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_minus_zero_is_not_zero(dtype: torch.dtype) -> None:
    zero = torch.zeros(3, dtype=dtype)
    assert torch.equal(zero, -zero)
    assert not bitwise_equal(zero, -zero)


def test_nan_is_equal_to_nothing_not_even_itself() -> None:
    spoiled = torch.tensor([1.0, math.nan])
    assert not bitwise_equal(spoiled, spoiled)
    assert not bitwise_equal(torch.tensor([1.0, 2.0]), spoiled)


def test_equal_values_of_another_dtype_or_shape_are_different() -> None:
    ones = torch.ones(2, 3)
    assert not bitwise_equal(ones, ones.double())
    assert not bitwise_equal(ones, ones.view(3, 2))


def test_strides_do_not_matter() -> None:
    values = torch.rand(3, 4)
    assert bitwise_equal(values.t(), values.t().contiguous())


@pytest.mark.parametrize(
    "value", [torch.tensor(3), torch.tensor([True, False]), torch.tensor(0.5), torch.empty(0)]
)
def test_integers_booleans_scalars_and_nothing_are_compared_too(value: torch.Tensor) -> None:
    assert bitwise_equal(value, value.clone())


def test_infinity_equals_itself() -> None:
    assert bitwise_equal(torch.tensor([math.inf, -math.inf]), torch.tensor([math.inf, -math.inf]))


# ---- whole runs


def test_the_same_states_are_equal_and_every_tensor_counts() -> None:
    verdict = compare(trajectory(), trajectory())
    assert (verdict.outcome, verdict.detail, verdict.num_tensors, verdict.exit_code) == ("equal", "", 24, 0)


def test_a_difference_names_step_quantity_block_tensor_index_and_both_values() -> None:
    other = trajectory()
    offset = SIGNATURES[0].row_size("lora_B") + SIGNATURES[1].tensors[3].offset
    tensor = other.tensors["1/weights/lora_B"]
    expected = tensor[offset + 5].item()
    tensor[offset + 5] = 9.5
    tensor[offset + 7] = 9.5
    verdict = compare(trajectory(), other)
    assert (verdict.outcome, verdict.exit_code) == ("different", 1)
    assert verdict.detail == (
        "first difference at step 1, weights, block 1, tensor mlp.down_proj.lora_B, index [2, 1]: "
        f"{expected!r} against 9.5 (2 differ)"
    )


def test_the_earliest_step_is_reported_and_in_it_what_comes_to_exist_first() -> None:
    other = trajectory()
    for key in ("1/losses", "0/weights/lora_A", "0/exp_avg/lora_A", "0/gradients/lora_B"):
        other.tensors[key][0] += 1
    assert compare(trajectory(), other).detail.startswith("first difference at step 0, gradients, block 0")


def test_steps_are_ordered_as_numbers() -> None:
    other = trajectory(12)
    other.tensors["10/losses"][0] += 1
    other.tensors["9/losses"][0] += 1
    assert compare(trajectory(12), other).detail.startswith("first difference at step 9, losses")


def test_nan_in_both_runs_is_different() -> None:
    first, second = trajectory(), trajectory()
    for run in (first, second):
        run.tensors["0/losses"][1] = math.nan
    detail = compare(first, second).detail
    assert detail == "first difference at step 0, losses, element 1: nan against nan (1 differ)"


def test_a_difference_in_the_padding_says_so() -> None:
    other = trajectory()
    other.tensors["0/weights/lora_A"][SIGNATURES[0].row_size("lora_A") - 1] = 7.0
    assert "padding element" in compare(trajectory(), other).detail


def test_another_dtype_is_a_difference_with_both_named() -> None:
    other = trajectory()
    other.tensors["0/losses"] = other.tensors["0/losses"].double()
    assert "torch.float32 [3] against torch.float64 [3]" in compare(trajectory(), other).detail


def test_the_generator_s_state_counts() -> None:
    other = trajectory()
    other.tensors["1/rng"][3] = 99
    assert compare(trajectory(), other).detail == (
        "first difference at step 1, rng, element 3: 3 against 99 (1 differ)"
    )


def _other_adapters(run: Trajectory) -> Trajectory:
    return Trajectory(SIGNATURES[:1], run.tensors)


def _one_step_less(run: Trajectory) -> Trajectory:
    return Trajectory(SIGNATURES, {k: v for k, v in run.tensors.items() if k[0] == "0"})


@pytest.mark.parametrize(
    ("change", "reason"),
    [(_other_adapters, "the runs have different adapters"), (_one_step_less, "only one run recorded ['1/")],
)
def test_runs_that_recorded_different_things_cannot_be_compared(
    change: Callable[[Trajectory], Trajectory], reason: str
) -> None:
    verdict = compare(trajectory(), change(trajectory()))
    assert (verdict.outcome, verdict.exit_code) == ("cannot compare", 3)
    assert verdict.detail.startswith(reason)


def test_two_empty_runs_cannot_be_compared() -> None:
    empty = Trajectory(SIGNATURES, {})
    assert compare(empty, empty).outcome == "cannot compare"


def test_a_step_later_is_a_part_of_the_run() -> None:
    assert {key[0] for key in trajectory(3).from_step(1).tensors} == {"1", "2"}


def test_a_real_run_records_every_quantity_of_every_step(
    start_run: Callable[..., CaseRun],
) -> None:
    recorded = start_run().train(2).tensors
    assert {key.split("/")[1] for key in recorded} == {key.split("/")[1] for key in trajectory().tensors}
    assert {key.split("/")[0] for key in recorded} == {"0", "1"}
