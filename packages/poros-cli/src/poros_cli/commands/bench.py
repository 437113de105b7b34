"""`poros bench`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from poros_cli.run_options import POSITIVE

if TYPE_CHECKING:
    from poros.plugins import Registry

__all__ = ["bench"]

EPILOG = """\b
Examples:
  poros bench ./Qwen2.5-7B --seq-len 512 --micro-batches 8
  poros bench Qwen/Qwen3-32B --seq-len 2048 --vram 8GB --json

\b
Weights are random and none are read: a folder with a config.json is enough, and of a hub model config.json is
fetched. Streamed and resident are measured in one process each, one after the other. Whole optimizer steps:
forward, backward, clipping, AdamW. Exit code 1 if one of the two could not be measured.
"""


@click.command(epilog=EPILOG)
@click.argument("model", metavar="MODEL")
@click.option("--seq-len", type=click.IntRange(min=2), default=512, show_default=True, help="Tokens per row.")
@click.option("--micro-batches", type=POSITIVE, default=1, show_default=True, help="Micro-batches per step.")
@click.option("--micro-batch-size", type=POSITIVE, default=1, show_default=True, help="Rows at a time.")
@click.option("--vram", metavar="SIZE", help="What the streamed run may take, CUDA context included.")
@click.option(
    "--slots", type=click.IntRange(min=2), metavar="N", help="Device slots [default: the planner's]."
)
@click.option("--quantization", default="nf4", show_default=True, metavar="NAME", help="Weight format.")
@click.option("--rank", type=POSITIVE, default=16, show_default=True, help="Adapter rank.")
@click.option(
    "--blocks", type=click.Choice(["eager", "compiled"]), default="eager", show_default=True, help="Blocks."
)
@click.option("--steps", type=POSITIVE, default=5, show_default=True, help="Timed steps; the median counts.")
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda|cuda:N", help="Device.")
@click.option("--no-resident", is_flag=True, help="Leave the resident run out, where it does not fit.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_obj
def bench(
    registry: Registry,
    model: str,
    seq_len: int,
    micro_batches: int,
    micro_batch_size: int,
    vram: str | None,
    slots: int | None,
    quantization: str,
    rank: int,
    blocks: str,
    steps: int,
    device: str,
    no_resident: bool,
    as_json: bool,
) -> None:
    """Measure training steps of MODEL's shape, streamed and resident side by side.

    MODEL is a local folder or a hub id. Shows step time, tokens per second, peak memory of device and host, bytes
    moved, how long visits waited for copies, and how near the step is to what the link and the GPU allow.
    """
    from poros.bench import BenchSpec
    from poros.checkpoint import load_config, resolve_model
    from poros.run import describe_model
    from poros.units import parse_size
    from poros_cli.bench_table import measure_both, show_bench
    from poros_cli.terminal import TerminalConsole

    folder = resolve_model(model, config_only=True)
    # Whatever is wrong with the model or the format is said here, not by a process that was started for it.
    describe_model(load_config(folder), quantization=quantization, registry=registry)
    spec = BenchSpec(
        model=str(folder),
        quantization=quantization,
        rank=rank,
        plan={"residency": "streamed"} | ({} if slots is None else {"num_slots": slots}),
        planned=True,
        numerics={"blocks": blocks},
        micro_batches=micro_batches,
        micro_batch_size=micro_batch_size,
        tokens=seq_len,
        device=device,
        steps=steps,
        memory_limit_bytes=None if vram is None else parse_size(vram, "vram"),
    )
    facts = measure_both(spec, resident=not no_resident)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        show_bench(facts, TerminalConsole())
    failed = [name for name, result in facts["results"].items() if "error" in result]
    if failed:
        raise click.exceptions.Exit(1)
