"""docs/cli.md holds the commands' own help."""

from __future__ import annotations

from pathlib import Path

import pytest
from cogapp import Cog

from poros_cli.help_pages import help_pages

PAGE = Path(__file__).resolve().parents[3] / "docs" / "cli.md"


def test_generated_help_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert Cog().main(["cog", "--check", str(PAGE)]) == 0, "run `uv run nox -s docs -- --write`"


@pytest.mark.parametrize("page", list(help_pages()), ids=lambda page: page[0])
def test_every_help_page_shows_an_example(page: tuple[str, str]) -> None:
    assert "  poros " in page[1] or "  uv run " in page[1]


@pytest.mark.parametrize("page", list(help_pages()), ids=lambda page: page[0])
def test_every_option_has_help(page: tuple[str, str]) -> None:
    options = page[1].split("Options:")[1].split("\n\n")[0].strip("\n").splitlines()
    for line, after in zip(options, [*options[1:], ""], strict=True):
        if line.lstrip().startswith("-"):
            words = line.strip().split("  ")
            assert len(words) > 1 or not after.lstrip().startswith("-"), line
