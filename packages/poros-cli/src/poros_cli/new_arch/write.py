"""Writing the skeleton: names that follow from the model type, and the packaged templates filled in with them."""

from __future__ import annotations

import difflib
import importlib.resources
import importlib.util
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

from poros import __version__
from poros.checkpoint import transformers_knows
from poros.errors import ConfigError, OutputError, explain
from poros.plugins import Registry

__all__ = ["Skeleton", "write_skeleton"]

# Suffix of the packaged templates: tools that look for tests or sources must not take them for such.
SUFFIX = ".tmpl"
PACKAGE_FOLDER = "src"
NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Skeleton:
    """Where a skeleton was written and what its pieces are called."""

    folder: Path
    distribution: str
    package: str
    model_type: str


def write_skeleton(model_type: str, output: Path, registry: Registry) -> Skeleton:
    """Write ``output/poros-arch-<model type>`` and return what it holds.

    Args:
        model_type: a ``model_type`` of the installed Transformers that no loaded plugin serves.
        output: folder in which the distribution's own folder is made.

    Raises:
        ConfigError: the name is no model type of Transformers, or is served already.
        OutputError: the folder exists or cannot be written.
    """
    _check_name(model_type, registry)
    slug = model_type.replace("_", "-")
    distribution, package = f"poros-arch-{slug}", f"poros_arch_{model_type.replace('-', '_')}"
    _check_package(package)
    folder = output / distribution
    if folder.exists():
        raise OutputError(
            explain(
                "Cannot write the skeleton",
                expected="a folder that does not exist yet",
                got=str(folder),
                next_step="Give another `--output`; nothing is overwritten",
            )
        )
    release, minor, _ = __version__.split(".", 2)
    words = {
        "class_name": "".join(part.capitalize() for part in re.split("[-_]", model_type)),
        "distribution": distribution,
        "entry_point": f"arch-{slug}",
        "model_type": model_type,
        "package": package,
        "poros_minimum": f"{release}.{minor}",
        "poros_limit": f"{release}.{int(minor) + 1}",
    }
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output, prefix=".new-arch-") as temporary:
            for path, text in _templates():
                inside = (
                    Path(PACKAGE_FOLDER, package, *path.parts[1:])
                    if path.parts[0] == PACKAGE_FOLDER
                    else path
                )
                where = Path(temporary, distribution, inside)
                where.parent.mkdir(parents=True, exist_ok=True)
                where.write_text(Template(text).substitute(words), encoding="utf-8")
            Path(temporary, distribution).rename(folder)
    except OSError as error:
        raise OutputError(
            explain(
                "Cannot write the skeleton",
                expected="a folder that can be written",
                got=error.strerror or error,
                where=str(output),
            )
        ) from error
    return Skeleton(folder=folder, distribution=distribution, package=package, model_type=model_type)


def _check_name(model_type: str, registry: Registry) -> None:
    if not NAME.fullmatch(model_type):
        raise ConfigError(
            explain(
                "Bad name of an architecture",
                expected="a `model_type` such as `llama` or `smollm3`: lower case letters, digits, `-` and `_`",
                got=f"`{model_type}`",
            )
        )
    if registered := registry.architecture_for(model_type):
        raise ConfigError(
            explain(
                f"`{model_type}` is served already",
                expected="a model type that no loaded plugin serves",
                got=f"one of distribution `{registered.distribution}`",
            )
        )
    if not transformers_knows(model_type):
        from transformers import CONFIG_MAPPING

        near = difflib.get_close_matches(model_type, list(CONFIG_MAPPING), n=1)
        raise ConfigError(
            explain(
                "Bad name of an architecture",
                expected="a `model_type` that the installed Transformers knows",
                got=f"`{model_type}`",
                next_step=f"Did you mean `{near[0]}`?"
                if near
                else "See `model_type` in the model's config.json",
            )
        )


def _check_package(package: str) -> None:
    """Refuse an import name that is taken: two packages of one name hide each other."""
    if importlib.util.find_spec(package) is not None:
        got = f"`{package}`, installed"
        raise ConfigError(
            explain("Bad name of an architecture", expected="an import name that is free", got=got)
        )


def _templates() -> Iterator[tuple[Path, str]]:
    """Yield (relative path without suffix, text) of every packaged template."""

    def walk(folder: Traversable, prefix: Path) -> Iterator[tuple[Path, str]]:
        for item in sorted(folder.iterdir(), key=lambda item: item.name):
            if item.is_dir():
                yield from walk(item, prefix / item.name)
            elif item.name.endswith(SUFFIX):
                yield prefix / item.name.removesuffix(SUFFIX), item.read_text(encoding="utf-8")

    yield from walk(importlib.resources.files("poros_cli.new_arch").joinpath("skeleton"), Path())
