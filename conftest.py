"""Tiers of the test suite. A tier that was asked for and cannot run is a failure, never a skip."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Tiny kernels on few cores: a pool of spinning threads costs more than it computes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without a GPU (Linux, or WSL's) Triton's kernels run in its interpreter; it looks for this when it is imported.
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

TIERS = ("cpu", "gpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, default="cpu", help="gpu also runs the tests marked `gpu`")
    parser.addoption("--real-models", action="store_true", help="also run the tests marked `real_model`")
    parser.addoption("--browser", action="store_true", help="also run the tests marked `browser`")
    parser.addoption("--reporters", action="store_true", help="also run the tests marked `reporters`")


@pytest.fixture(scope="session")
def tier(request: pytest.FixtureRequest) -> str:
    """The tier that was asked for: ``cpu`` or ``gpu``."""
    return str(request.config.getoption("--tier"))


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("--tier") == "gpu" and not _has_cuda():
        raise pytest.UsageError(
            "`--tier gpu`: expected a CUDA device, got none that torch can use. Run on a GPU machine or give "
            "`--tier cpu`."
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unwanted = set()
    if config.getoption("--tier") == "cpu":
        unwanted.add("gpu")
    if not config.getoption("--real-models"):
        unwanted.add("real_model")
    if not config.getoption("--reporters"):
        unwanted.add("reporters")
    if not config.getoption("--browser"):
        unwanted.add("browser")
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in unwanted)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _has_cuda() -> bool:
    import torch  # here, so that the CPU tier can collect tests without paying for the import

    return torch.cuda.is_available()
