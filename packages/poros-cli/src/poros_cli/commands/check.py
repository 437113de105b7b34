"""`poros check`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from poros.plugins import Registry

__all__ = ["check"]

EPILOG = """\b
Examples:
  poros check ./Qwen2.5-7B
  poros check Qwen/Qwen3-32B --rank 16 --max-length 4096 --json

\b
Exit code 0 if the model can be trained, 2 if it is refused. Nothing but its config and shard headers is read.
"""


@click.command(epilog=EPILOG)
@click.argument("model", metavar="MODEL")
@click.option("--quantization", default="nf4", show_default=True, metavar="NAME", help="Weight format.")
@click.option("--rank", type=click.IntRange(min=1), default=16, show_default=True, help="Adapter rank.")
@click.option("--targets", default=None, metavar="A,B,...", help="Linear layers to adapt, by leaf name.")
@click.option(
    "--max-length", type=click.IntRange(min=1), default=1024, show_default=True, help="Tokens per row."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.pass_obj
def check(
    registry: Registry,
    model: str,
    quantization: str,
    rank: int,
    targets: str | None,
    max_length: int,
    as_json: bool,
) -> None:
    """Say whether MODEL (a local folder or a hub id) can be trained, and in how much memory.

    Shows the architecture's verdict, blocks by kind, how many blocks the adapter targets match, bytes per block, and
    the predicted peak of device and host memory.
    """
    from poros.errors import PorosError
    from poros_cli.config import check_quantization

    check_quantization(quantization, registry.weight_formats)
    raise PorosError("`poros check` is not connected to the engine yet.")
