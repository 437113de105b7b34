"""Configs as text: the commented file of `poros config init` and the resolved one of `poros config show`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

import yaml

from poros_cli.config import RunConfig
from poros_cli.config_file import Given
from poros_cli.schema import settings
from poros_cli.values import dtype_name

__all__ = ["resolved_lines", "template", "written_template"]

DEFAULT = "default"
# Room for a value before its comment.
VALUE_CHARACTERS = 30


def template() -> str:
    """Return the commented config with every setting, as docs/config.md shows it."""
    return (files("poros_cli") / "config_template.yaml").read_text(encoding="utf-8")


def written_template(values: Mapping[str, str]) -> str:
    """Return `template` with other values for some of its top-level settings.

    Args:
        values: setting -> value, not yet in YAML.
    """
    text = template()
    for name, value in values.items():
        line = re.compile(rf"^{name}: +\S+ *", re.MULTILINE)
        item = f"{name}: {_in_yaml(value)}"
        text, count = line.subn(f"{item:<{VALUE_CHARACTERS}} ".replace("\\", r"\\"), text)
        assert count == 1, f"`{name}` is not a top-level setting of the template"
    return text


def resolved_lines(config: RunConfig, given: Mapping[str, Given]) -> Iterator[str]:
    """Yield a config file that gives the same run, with the origin of every value as its comment."""
    section = ""
    for setting in settings().values():
        owner: Any = config
        indent = ""
        if setting.section:
            owner, indent = getattr(config, setting.section), "  "
            if setting.section != section:
                section = setting.section
                yield f"{section}:"
        name = setting.path.rsplit(".", 1)[-1]
        line = f"{indent}{name}: {_in_yaml(getattr(owner, setting.field))}"
        origin = " ".join(given[setting.path].where.split()) if setting.path in given else DEFAULT
        yield f"{line:<{VALUE_CHARACTERS}} # {origin}"


def _in_yaml(value: Any) -> str:
    if (name := dtype_name(value)) is not None:
        value = name
    elif isinstance(value, tuple):
        value = list(value)
    elif isinstance(value, Mapping):
        value = dict(value)
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")
