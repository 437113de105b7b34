"""`poros check`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from poros_cli.run_options import POSITIVE, split_names

if TYPE_CHECKING:
    from poros.plugins import Registry

__all__ = ["check"]

EPILOG = """\b
Examples:
  poros check ./Qwen2.5-7B
  poros check Qwen/Qwen3-32B --rank 16 --max-length 4096 --json

\b
Exit code 0 if the model can be trained, 2 if it is refused. No weights are read: of a local folder the config and
the shards' headers, of a hub model config.json alone.
"""


@click.command(epilog=EPILOG)
@click.argument("model", metavar="MODEL")
@click.option("--quantization", default="nf4", show_default=True, metavar="NAME", help="Weight format.")
@click.option("--rank", type=POSITIVE, default=16, show_default=True, metavar="N", help="Adapter rank.")
@click.option(
    "--targets", callback=split_names, metavar="A,B,...", help="Linear layers to adapt, by leaf name."
)
@click.option(
    "--max-length", type=POSITIVE, default=1024, show_default=True, metavar="N", help="Tokens per row."
)
@click.option(
    "--micro-batch-size", type=POSITIVE, default=1, show_default=True, metavar="N", help="Rows at a time."
)
@click.option(
    "--micro-batches",
    type=POSITIVE,
    default=8,
    show_default=True,
    metavar="N",
    help="Micro-batches per step.",
)
@click.option(
    "--slots", type=click.IntRange(min=2), default=3, show_default=True, metavar="N", help="Device slots."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.pass_obj
def check(
    registry: Registry,
    model: str,
    quantization: str,
    rank: int,
    targets: tuple[str, ...] | None,
    max_length: int,
    micro_batch_size: int,
    micro_batches: int,
    slots: int,
    as_json: bool,
) -> None:
    """Say whether MODEL can be trained, and predict in how much memory.

    MODEL is a local folder or a hub id. Shows the architecture's verdict, blocks by kind, in how many blocks each
    adapter target matches, bytes per block, and the predicted peak of device and host memory, streamed and resident.
    """
    from rich.console import Console

    from poros.planning.prediction import StepShape
    from poros.settings import LoraSettings, Plan
    from poros_cli.model_check import check_model, show_check

    facts = check_model(
        model,
        quantization=quantization,
        lora=LoraSettings(rank=rank, targets=targets),
        plan=Plan(num_slots=slots),
        shape=StepShape(
            num_micro_batches=micro_batches, micro_batch_size=micro_batch_size, tokens=max_length
        ),
        registry=registry,
    )
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        show_check(facts, Console())
