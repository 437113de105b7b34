"""The parity gates of the Qwen architectures. ``--tier gpu`` runs the same cases on a GPU."""

from poros.parity.pytest_gates import ParityGates
from poros_arch_qwen.parity_cases import PARITY_CASES


class TestQwen2(ParityGates):
    architecture = "qwen2"
    all_cases = PARITY_CASES
    respawned = ParityGates.repeated
    compiled_on_cpu = True


class TestQwen3(ParityGates):
    architecture = "qwen3"
    all_cases = PARITY_CASES


class TestQwen3_5(ParityGates):  # noqa: N801 - the version's dot
    architecture = "qwen3_5"
    all_cases = PARITY_CASES
    # In 16 bits the delta rule amplifies rounding: against gradients in float32 the worst tensor of Poros has 0.9959,
    # of the unpatched loop 0.9911 (in_proj_a, whose gradient passes the decay). Their errors add up: 0.9900 was found
    # on the tiny cases, 2026-11-30, x86-64 CPU, torch 2.15, Transformers 5.24. In float32 the contract's bounds hold.
    bfloat16_gradient_cosine = 0.98
    # An H200 (torch 2.11, Transformers 5.17, the same day) was 2.77e-3 away after five steps.
    bfloat16_loss_tolerance = 4e-3
