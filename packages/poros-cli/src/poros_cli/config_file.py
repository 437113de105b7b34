"""Reading a `RunConfig` from a YAML file, `--set` and flags, in rising order of precedence.

Every message names the place: ``file:line:column``, the ``--set`` or the flag.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from poros.errors import ConfigError, explain
from poros_cli.config import RunConfig
from poros_cli.schema import REFUSED, nearest, sections, settings
from poros_cli.values import TAG, convert, dtype_name
from poros_data import DataError

__all__ = ["Given", "config_from_mapping", "load_config", "resolve_config"]

MERGE_KEY = "<<"
# Where values of a Python program stand, in messages.
PYTHON = "the given mapping"


@dataclass(frozen=True, slots=True)
class Given:
    """A value that somebody gave, and where: ``run.yaml:3:1``, ``--set lora.rank=8`` or a flag."""

    value: Any
    where: str


def load_config(
    file: Path | None, *, overrides: Iterable[str] = (), flags: Mapping[str, tuple[str, Any]] | None = None
) -> RunConfig:
    """Return the settings of a run; see `resolve_config`."""
    return resolve_config(file, overrides=overrides, flags=flags)[0]


def resolve_config(
    file: Path | None, *, overrides: Iterable[str] = (), flags: Mapping[str, tuple[str, Any]] | None = None
) -> tuple[RunConfig, Mapping[str, Given]]:
    """Return the settings of a run, and by path those that somebody gave; the others have their defaults.

    Args:
        file: YAML file, or None where flags say everything.
        overrides: ``key=value`` of every ``--set``, the value in YAML; a later one wins.
        flags: per setting path, the flag's name and its parsed value; they win over everything.

    Raises:
        ConfigError: a file that cannot be read, an unknown or doubled key, a wrong type or value, a missing setting.
    """
    given: dict[str, Given] = {}
    if file is not None:
        given.update(_read_file(file))
    for override in overrides:
        given.update(_read_override(override))
    for path, (flag, value) in (flags or {}).items():
        given[path] = Given(value, flag)
    _require_all(given, file)
    return _build(given), given


def config_from_mapping(values: Mapping[str, Any]) -> RunConfig:
    """Return the settings of a run that a Python program gives.

    Args:
        values: as a config file has them; a section may be its settings object, a path a `Path`, a dtype torch's own.

    Raises:
        ConfigError: see `resolve_config`.
    """
    given: dict[str, Given] = {}
    for path, value in values.items():
        kind = sections().get(path)
        if kind is not None and isinstance(value, kind):
            fields = {s.path: s.field for s in settings().values() if s.section == path}
            given.update({p: Given(getattr(value, field), PYTHON) for p, field in fields.items()})
        elif kind is not None:
            given.update(_flatten(_section(path, _represent(path, value), PYTHON), f"{path}.", PYTHON))
        else:
            given[path] = Given(_convert(path, _represent(path, value), PYTHON, PYTHON), PYTHON)
    _require_all(given, None)
    return _build(given)


class _Representer(yaml.SafeDumper):
    """Python values as YAML nodes; text is quoted, so that "8" stays text."""

    def represent_data(self, data: Any) -> yaml.Node:
        name = dtype_name(data)
        return super().represent_data(data) if name is None else self.represent_str(name)


_Representer.add_representer(str, lambda dumper, text: dumper.represent_scalar(f"{TAG}str", text, style="'"))
_Representer.add_multi_representer(Path, lambda dumper, path: dumper.represent_str(str(path)))


def _represent(path: str, value: Any) -> yaml.Node:
    try:
        node: yaml.Node = _Representer(io.StringIO()).represent_data(
            dict(value) if isinstance(value, Mapping) else value
        )
    except yaml.representer.RepresenterError as error:
        got = f"a value of type {type(error.args[-1]).__name__}"
        raise ConfigError(
            explain(f"Bad setting `{path}`", expected="what a config file can hold", got=got, where=PYTHON)
        ) from error
    return node


def _read_file(file: Path) -> dict[str, Given]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = explain(
            "Cannot read the config", expected="a readable YAML file", got=error, where=str(file)
        )
        raise ConfigError(message) from error
    root = _compose(text, str(file))
    if root is None:
        raise ConfigError(
            explain("Cannot read the config", expected="settings", got="an empty file", where=str(file))
        )
    if not isinstance(root, yaml.MappingNode):
        got = "a list" if isinstance(root, yaml.SequenceNode) else f"`{root.value}`"
        where = _place(root, str(file))
        raise ConfigError(
            explain("Cannot read the config", expected="`key: value` lines", got=got, where=where)
        )
    return _flatten(root, "", str(file))


def _read_override(override: str) -> dict[str, Given]:
    path, equals, text = override.partition("=")
    path, source = path.strip(), f"--set {override}"
    if not equals or not path:
        raise ConfigError(explain("Bad override", expected="`--set key=value`", got=f"`{source}`"))
    node = _compose(text, source)
    if path in sections():
        return _flatten(_section(path, node, source), f"{path}.", source)
    return {path: Given(_convert(path, node, source, source), source)}


def _compose(text: str, source: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    # Besides its own errors: an escape of no character, a number of thousands of digits, a hundred nested lists.
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        got = getattr(error, "problem", None) or str(error)
        raise ConfigError(
            explain("Cannot parse YAML", expected="valid YAML", got=got, where=where)
        ) from error


def _flatten(mapping: yaml.MappingNode, prefix: str, source: str) -> dict[str, Given]:
    found: dict[str, Given] = {}
    seen: dict[str, str] = {}
    for key, value in mapping.value:
        where = _place(key, source)
        if not isinstance(key, yaml.ScalarNode) or key.value == MERGE_KEY:
            got = "a merge key `<<`" if isinstance(key, yaml.ScalarNode) else "a list or mapping"
            raise ConfigError(explain("Bad key", expected="the name of a setting", got=got, where=where))
        path = prefix + key.value
        if path in seen:
            message = explain(
                f"Setting `{path}`", expected="one value", got="two", where=f"{seen[path]} and {where}"
            )
            raise ConfigError(message)
        seen[path] = where
        if path in sections():
            found.update(_flatten(_section(path, value, where), f"{path}.", source))
        else:
            found[path] = Given(_convert(path, value, _place(value, source), where), where)
    return found


def _section(path: str, node: yaml.Node | None, where: str) -> yaml.MappingNode:
    if isinstance(node, yaml.MappingNode):
        return node
    known = ", ".join(_leaves(path))
    raise ConfigError(
        explain(f"Bad section `{path}`", expected=f"keys among {known}", got="none", where=where)
    )


def _convert(path: str, node: yaml.Node | None, where: str, key_where: str) -> Any:
    if path in settings():
        return convert(node, settings()[path].annotation, path, where)
    if reason := REFUSED.get(path.rpartition(".")[2]):
        raise ConfigError(f"Cannot use the setting `{path}` ({key_where}): {reason}.")
    if close := nearest(path):
        raise ConfigError(f"Unknown setting `{path}` ({key_where}). Did you mean `{close}`?")
    section = path.split(".")[0] if "." in path else ""
    known = _leaves(section) if section in sections() else [*_leaves(""), *sections()]
    raise ConfigError(f"Unknown setting `{path}` ({key_where}). Known: {', '.join(known)}.")


def _leaves(section: str) -> list[str]:
    return [s.path.rsplit(".", 1)[-1] for s in settings().values() if s.section == section]


def _place(node: yaml.Node, source: str) -> str:
    if source.startswith("--set") or node.start_mark is None:
        return source
    return f"{source}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def _require_all(given: Mapping[str, Given], file: Path | None) -> None:
    missing = [s.path for s in settings().values() if s.required and s.path not in given]
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        place = str(file) if file else "no config file was given"
        flags = " ".join(f"--{name} ..." for name in missing)
        raise ConfigError(
            f"Missing settings: expected {names}, got none of these ({place}). Add them to the file or give `{flags}`."
        )


def _build(given: Mapping[str, Given]) -> RunConfig:
    arguments: dict[str, dict[str, Any]] = {"": {}, **{section: {} for section in sections()}}
    for path, entry in given.items():
        setting = settings()[path]
        arguments[setting.section][setting.field] = entry.value
    made = {name: _make(kind, name, arguments[name], given) for name, kind in sections().items()}
    config = _make(RunConfig, "", {**arguments[""], **made}, given)
    assert isinstance(config, RunConfig)
    return config


def _make(kind: Any, section: str, arguments: Mapping[str, Any], given: Mapping[str, Given]) -> Any:
    """Build one dataclass; its complaint about a value gets the place where the value was given."""
    try:
        return kind(**arguments)
    except (ConfigError, DataError) as error:
        named = re.search(r"`([\w.]+)`", str(error))
        leaf = named.group(1).rsplit(".", 1)[-1] if named else ""
        path = f"{section}.{leaf}" if section else leaf
        if path not in given:
            raise
        raise ConfigError(f"{str(error).rstrip('.')} ({given[path].where}).") from error
