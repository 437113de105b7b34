"""The example plugin is what docs/plugins.md prints, and stays outside the workspace."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "poros-arch-llama"
PAGE = ROOT / "docs" / "plugins.md"
SOURCES = sorted((EXAMPLE / "src" / "poros_arch_llama").glob("[!_]*.py"))
# What the page's heading promises for code: neither blank lines nor docstrings.
MAX_CODE_LINES = 20


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_the_page_prints_the_examples_code(source: Path) -> None:
    name = source.relative_to(EXAMPLE).as_posix()
    assert f"```python\n# {name}\n{source.read_text().strip()}\n```" in PAGE.read_text()


def test_the_page_prints_the_examples_entry_point() -> None:
    (printed,) = re.findall(r"```toml\n# pyproject.toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    assert tomllib.loads(printed)["project"]["entry-points"] == project["entry-points"]


def test_the_example_is_as_short_as_the_page_says() -> None:
    lines = [line.strip() for source in SOURCES for line in source.read_text().splitlines()]
    assert len([line for line in lines if line and not line.startswith('"""')]) <= MAX_CODE_LINES


def test_the_example_is_no_member_of_the_workspace() -> None:
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]
    assert EXAMPLE not in [path for pattern in workspace["members"] for path in ROOT.glob(pattern)]
