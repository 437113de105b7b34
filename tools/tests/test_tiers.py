"""A GPU tier without a GPU fails; the CPU tier says what it left out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parents[2]
INI = "[pytest]\nmarkers =\n  gpu: g\n  real_model: r\n"


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest((ROOT / "conftest.py").read_text())
    pytester.makeini(INI)
    pytester.makepyfile(
        "import pytest\ndef test_plain(): pass\n@pytest.mark.gpu\ndef test_on_gpu(): pass\n"
        "@pytest.mark.real_model\ndef test_on_real_model(): pass\n"
    )
    return pytester


def test_cpu_tier_deselects_marked_tests_and_counts_them(suite: pytest.Pytester) -> None:
    suite.runpytest_inprocess().assert_outcomes(passed=1, deselected=2)


def test_real_models_flag_selects_real_model_tests(suite: pytest.Pytester) -> None:
    suite.runpytest_inprocess("--real-models").assert_outcomes(passed=2, deselected=1)


def test_gpu_tier_runs_gpu_tests_where_a_device_exists(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    suite.runpytest_inprocess("--tier", "gpu").assert_outcomes(passed=2, deselected=1)


def test_gpu_tier_without_a_device_fails(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    outcome = suite.runpytest_inprocess("--tier", "gpu")
    assert outcome.ret != 0
    outcome.stderr.fnmatch_lines(["*expected a CUDA device*"])


def test_unknown_tier_is_refused(suite: pytest.Pytester) -> None:
    assert suite.runpytest_inprocess("--tier", "tpu").ret != 0
