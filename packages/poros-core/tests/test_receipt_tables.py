"""The tables of the pages are what the receipts and the code say."""

from pathlib import Path

import pytest
from cogapp import Cog

ROOT = Path(__file__).resolve().parents[3]


PAGES = [
    "README.md",
    "docs/architecture-support.md",
    "docs/guarantees.md",
    "docs/performance.md",
    "docs/plugins.md",
    "validation/README.md",
]


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_generated(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert Cog().main(["cog", "--check", page]) == 0, "run `uv run nox -s docs -- --write`"
