"""Every setting has one name, is documented with its default, and every foreign name leads to one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from poros.errors import ConfigError
from poros_cli.config import RunConfig, parse_size
from poros_cli.config_file import load_config
from poros_cli.run_options import FLAGS
from poros_cli.schema import FOREIGN, nearest, sections, settings

PAGE = Path(__file__).resolve().parents[3] / "docs" / "config.md"


def documented() -> str:
    found = re.search(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found.group(1)


def test_documented_config_names_every_setting_and_no_other() -> None:
    tree = yaml.safe_load(documented())
    leaves = [
        f"{key}.{leaf}" if key in sections() else key
        for key, entry in tree.items()
        for leaf in (entry if key in sections() else [key])
    ]
    assert leaves == list(settings())


def test_documented_config_holds_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(documented())
    config = load_config(tmp_path / "run.yaml")
    assert config == RunConfig(model=config.model, data=config.data, output=config.output)


def test_every_foreign_name_leads_to_a_setting() -> None:
    assert set(FOREIGN.values()) <= set(settings())


def test_every_flag_stands_for_a_setting() -> None:
    assert {flag.path for flag in FLAGS} <= set(settings())


@pytest.mark.parametrize(
    ("path", "expected"),
    [("outptu", "output"), ("plan.slot", "plan.slots"), ("lora.r", "lora.rank"), ("optimiser", "optimizer")],
)
def test_nearest_name(path: str, expected: str) -> None:
    assert nearest(path) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("6GiB", 6 * 2**30), ("500 MB", 500 * 10**6), ("1.5gib", 3 * 2**29), ("20KB", 20_000)],
)
def test_sizes_carry_their_unit(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["6", "GiB", "6 potatoes", "-1GB", ""])
def test_a_size_without_unit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="`vram`: expected a size such as 6GiB or 500MB"):
        parse_size(text)
