"""`poros check`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from poros_cli.run_options import PLANNED, POSITIVE, split_names

if TYPE_CHECKING:
    from poros.plugins import Registry

__all__ = ["check"]

EPILOG = """\b
Examples:
  poros check ./Qwen2.5-7B
  poros check Qwen/Qwen3-32B --vram 8GB --seq-len 2048 --micro-batches 8
  poros check Qwen/Qwen3-32B --rank 16 --max-length 4096 --json

\b
Exit code 0 if the model can be trained, 2 if it is refused or no plan fits into the budgets. No weights are read: of
a local folder the config and the shards' headers, of a hub model config.json alone.
"""


@click.command(epilog=EPILOG)
@click.argument("model", metavar="MODEL")
@click.option("--quantization", default="nf4", show_default=True, metavar="NAME", help="Weight format.")
@click.option("--rank", type=POSITIVE, default=16, show_default=True, metavar="N", help="Adapter rank.")
@click.option(
    "--targets", callback=split_names, metavar="A,B,...", help="Linear layers to adapt, by leaf name."
)
@click.option(
    "--max-length",
    "--seq-len",
    "max_length",
    type=POSITIVE,
    default=1024,
    show_default=True,
    metavar="N",
    help="Tokens per row.",
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
@click.option("--vram", metavar="SIZE", help="Device memory that the run may take, such as 8GB.")
@click.option("--ram", metavar="SIZE", help="Host memory that the run may take, such as 24GB.")
@click.option("--slots", type=click.IntRange(min=2), metavar="N", help=f"Device slots {PLANNED}.")
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
    vram: str | None,
    ram: str | None,
    slots: int | None,
    as_json: bool,
) -> None:
    """Say whether MODEL can be trained, and plan it: where everything lives, in how much memory and how fast.

    MODEL is a local folder or a hub id. Shows the architecture's verdict, blocks by kind, in how many blocks each
    adapter target matches, the plan for the budgets with its predicted step time, what bounds it and what one more GB
    would buy, and the predicted peak of device and host memory, beside that of a run with every block resident.
    """
    from poros.planning.request import PlanRequest
    from poros.planning.shape import StepShape
    from poros.settings import LoraSettings
    from poros.units import parse_size
    from poros_cli.model_check import check_model, show_check
    from poros_cli.terminal import TerminalConsole

    facts = check_model(
        model,
        quantization=quantization,
        lora=LoraSettings(rank=rank, targets=targets),
        request=PlanRequest(num_slots=slots),
        shape=StepShape(
            num_micro_batches=micro_batches, micro_batch_size=micro_batch_size, tokens=max_length
        ),
        vram_bytes=None if vram is None else parse_size(vram, "vram"),
        ram_bytes=None if ram is None else parse_size(ram, "ram"),
        registry=registry,
    )
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        show_check(facts, TerminalConsole())
