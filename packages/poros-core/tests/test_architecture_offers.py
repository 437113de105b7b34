"""A model type that an uninstalled package of this project serves is refused with the exact command that adds it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from poros.architecture import OFFERED_ELSEWHERE, blockwise_arch_check
from poros.errors import ArchitectureError
from poros.plugins import load_registry


@pytest.mark.parametrize("model_type", OFFERED_ELSEWHERE)
def test_missing_architecture_package_is_named(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POROS_PLUGINS", "")
    config: Any = SimpleNamespace(model_type=model_type)
    with pytest.raises(ArchitectureError, match=f"Run `uv add {OFFERED_ELSEWHERE[model_type]}`"):
        blockwise_arch_check(config, load_registry())


@pytest.mark.parametrize("model_type", OFFERED_ELSEWHERE)
def test_named_package_brings_the_model_type(model_type: str) -> None:
    registered = load_registry().architecture_for(model_type)
    assert registered is not None
    assert registered.distribution == OFFERED_ELSEWHERE[model_type]
