"""Every setting has one name, is documented with its default, and every foreign name leads to one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from poros.errors import ConfigError
from poros_cli.config import RunConfig
from poros_cli.config_file import load_config
from poros_cli.config_text import template
from poros_cli.run_options import FLAGS
from poros_cli.schema import FOREIGN, nearest, sections, settings

PAGE = Path(__file__).resolve().parents[3] / "docs" / "config.md"


def documented() -> str:
    found = re.search(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    assert found.group(1) == template(), "run `uv run nox -s docs -- --write`"
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


@pytest.mark.parametrize("path", ["lora.use_dora", "use_dora", "peft_use_dora"])
def test_dora_is_refused_by_name_with_the_reason(tmp_path: Path, path: str) -> None:
    section, _, leaf = path.rpartition(".")
    line = f"{section}: {{{leaf}: true}}" if section else f"{leaf}: true"
    (tmp_path / "run.yaml").write_text(f"model: m\ndata: d\noutput: o\n{line}\n")
    with pytest.raises(
        ConfigError, match=rf"`{path}` \(.*run\.yaml:4.*DoRA is not offered: it trains a magnitude"
    ):
        load_config(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("override", "section", "field", "value"),
    [
        ("optimizer.name=adamw_8bit", "optimizer", "name", "adamw_8bit"),
        ("optimizer.lora_plus_ratio=16", "optimizer", "lora_plus_ratio", 16.0),
        ("numerics.neftune_alpha=5", "numerics", "neftune_alpha", 5.0),
        ("lora.use_rslora=true", "lora", "use_rslora", True),
        ("lora.init_from=runs/first", "lora", "init_from", "runs/first"),
    ],
)
def test_what_a_run_optimizes_with_can_be_set(override: str, section: str, field: str, value: object) -> None:
    config = load_config(None, overrides=[override, "model=m", "data=d", "output=o"])
    assert getattr(getattr(config, section), field) == value


def test_a_schedule_without_its_decay_is_refused_with_its_place(tmp_path: Path) -> None:
    text = "model: m\ndata: d\noutput: o\noptimizer:\n  schedule: warmup_stable_decay\n  decay_steps: 0\n"
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"`decay_steps`: expected a positive integer .*run\.yaml:6:3"):
        load_config(tmp_path / "run.yaml")


@pytest.mark.parametrize("name", ["vram", "ram"])
@pytest.mark.parametrize("text", ["8", "8G", "viel", "-1GB"])
def test_a_budget_that_is_no_size_is_refused_with_examples_and_its_place(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / "run.yaml").write_text(f"model: m\ndata: d\noutput: o\n{name}: {text}\n")
    with pytest.raises(ConfigError, match=rf"`{name}`: expected a size: 8GB .*run.yaml:4:1"):
        load_config(tmp_path / "run.yaml")


def test_plain_bytes_are_a_budget(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: m\ndata: d\noutput: o\nvram: 8000000000\n")
    assert load_config(tmp_path / "run.yaml").vram == "8000000000"


def test_what_the_user_does_not_say_about_the_plan_is_left_to_the_planner() -> None:
    config = load_config(None, overrides=["plan.slots=4", "model=m", "data=d", "output=o"])
    assert config.plan.pinned() == {"num_slots": 4}
