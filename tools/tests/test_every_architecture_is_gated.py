"""An architecture that counts as validated has gates of its own, and a nox session that runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from poros.architecture import GATED_DISTRIBUTIONS
from poros.plugins import load_registry

ROOT = Path(__file__).parents[2]
REGISTRY = load_registry()
GATED = {
    name: registered.distribution
    for name, registered in REGISTRY.architectures.items()
    if registered.distribution in GATED_DISTRIBUTIONS
}


@pytest.mark.parametrize("name", GATED)
def test_every_validated_architecture_has_cases_gates_and_a_session(name: str) -> None:
    cases = [case for case, found in REGISTRY.parity_cases().items() if found.value.architecture == name]
    assert cases, "no parity case"
    tests = ROOT / "packages" / GATED[name] / "tests" / "test_parity.py"
    assert f'architecture = "{name}"' in tests.read_text(), "no subclass of ParityGates"
    assert f'name="parity-{name}"' in (ROOT / "noxfile.py").read_text(), "no nox session"
