"""Every setting has one name, is documented with its default, and every foreign name leads to one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from poros.errors import FormatError
from poros.plugins import Registered
from poros_cli.config import RunConfig, check_quantization
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


FORMATS = {"nf4": Registered(object(), "poros-quant")}


def test_registered_format_is_accepted() -> None:
    check_quantization("nf4", FORMATS)


def test_int8_is_refused_with_the_reason() -> None:
    with pytest.raises(FormatError, match=r"`int8` is not offered: .*outlier columns.*Offered: nf4"):
        check_quantization("int8", FORMATS)


def test_unknown_format_lists_what_is_offered() -> None:
    with pytest.raises(FormatError, match="expected nf4, got 'gptq'"):
        check_quantization("gptq", FORMATS)


def test_no_format_at_all_names_what_to_add() -> None:
    with pytest.raises(FormatError, match="uv add poros-quant"):
        check_quantization("nf4", {})
