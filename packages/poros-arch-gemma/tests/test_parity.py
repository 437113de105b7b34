"""The parity gates of the Gemma architectures. ``--tier gpu`` runs the same cases on a GPU."""

from poros.parity.pytest_gates import ParityGates
from poros_arch_gemma.parity_cases import PARITY_CASES


class TestGemma3(ParityGates):
    architecture = "gemma3"
    all_cases = PARITY_CASES
