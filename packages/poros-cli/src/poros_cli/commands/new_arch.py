"""`poros new-arch`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from poros.plugins import Registry

__all__ = ["new_arch"]

EPILOG = """\b
Example:
  poros new-arch smollm3 --output ~/src
  cd ~/src/poros-arch-smollm3 && uv run pytest

\b
Exit code 2 if the name is no model type, is served already, or the folder exists.
"""


@click.command(name="new-arch", epilog=EPILOG)
@click.argument("name", metavar="NAME")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Folder in which poros-arch-NAME is made [default: this one].",
)
@click.pass_obj
def new_arch(registry: Registry, name: str, output: Path) -> None:
    """Write the skeleton of a distribution that adds the model type NAME to Poros.

    A pyproject.toml with the entry point, the architecture on Poros' base for plain decoders, the plugin, a README and
    a test that examines the whole contract. The licence is left to you. Nothing is overwritten.
    """
    from poros_cli.new_arch import write_skeleton

    made = write_skeleton(name, output.expanduser(), registry)
    click.echo(f"Wrote {made.folder} (distribution `{made.distribution}`, package `{made.package}`).")
    click.echo(
        "Next: `uv run pytest` in it, with UV_FIND_LINKS=DIR where Poros is a folder of wheels. "
        f"The test says which clause of the contract `{made.model_type}` needs more for; "
        "docs/plugins.md explains each."
    )
