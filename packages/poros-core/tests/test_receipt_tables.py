"""The tables of README.md and validation/README.md are what the receipts say."""

from pathlib import Path

import pytest
from cogapp import Cog

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("page", ["README.md", "validation/README.md", "docs/performance.md"])
def test_tables_are_generated_from_the_receipts(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert Cog().main(["cog", "--check", page]) == 0, "run `uv run nox -s docs -- --write`"
