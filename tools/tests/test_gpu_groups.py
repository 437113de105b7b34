"""No GPU test is forgotten: whatever is marked belongs to a group of `validation/gpu_tests.py`."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_file_with_gpu_tests_belongs_to_a_group() -> None:
    groups = runpy.run_path(str(ROOT / "validation" / "gpu_tests.py"))["GROUPS"]
    grouped = {given.partition("::")[0] for chosen in groups.values() for given in chosen}
    marked = {
        str(path.relative_to(ROOT))
        for path in ROOT.glob("packages/*/tests/test_*.py")
        if "pytest.mark.gpu" in path.read_text(encoding="utf-8")
    }
    assert marked
    assert marked <= grouped
    assert all((ROOT / path).is_file() for path in grouped)
