"""The parity gates of the Qwen architectures. ``--tier gpu`` runs the same cases on a GPU."""

from poros.parity.pytest_gates import ParityGates
from poros_arch_qwen.parity_cases import PARITY_CASES


class TestQwen2(ParityGates):
    architecture = "qwen2"
    all_cases = PARITY_CASES
    compiled_on_cpu = True


class TestQwen3(ParityGates):
    architecture = "qwen3"
    all_cases = PARITY_CASES
