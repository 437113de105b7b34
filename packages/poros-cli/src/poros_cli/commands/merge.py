"""`poros merge`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from poros.plugins import Registry

__all__ = ["merge"]

EPILOG = """\b
Examples:
  poros merge runs/first --output merged
  poros merge runs/first --model ./Qwen2.5-7B --output merged --base dequantized
  poros merge ./some-peft-adapter --model ./Qwen2.5-7B --output merged --shard-size 2GB

\b
--base original      onto the checkpoint's own weights: what other programs expect
--base dequantized   onto the very base that training multiplied with: each linear weight quantized and dequantized
A merge into 4-bit weights is not offered: it rounds most of the adapter away. docs/export.md says what to do with the
folder.
"""


@click.command(epilog=EPILOG)
@click.argument("adapter", metavar="ADAPTER_OR_RUN", type=click.Path(path_type=Path))
@click.option("--model", metavar="DIR|ID", help="Base model [default: the one that the adapter names].")
@click.option("--output", required=True, metavar="DIR", help="New folder of the merged model.")
@click.option(
    "--base",
    type=click.Choice(("original", "dequantized")),
    default="original",
    show_default=True,
    help="Weights that the adapter is added to.",
)
@click.option(
    "--quantization",
    metavar="NAME",
    help="Weight format that the base was trained in [default: the run's; nf4 of a PEFT folder].",
)
@click.option(
    "--shard-size",
    default="5GB",
    show_default=True,
    metavar="SIZE",
    help="Largest file of weights; bounds the host memory of writing.",
)
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda|cuda:N", help="Device.")
@click.pass_obj
def merge(
    registry: Registry,
    adapter: Path,
    model: str | None,
    output: str,
    base: str,
    quantization: str | None,
    shard_size: str,
    device: str,
) -> None:
    """Add an adapter to its base and write a 16-bit model that stock Transformers loads.

    ADAPTER_OR_RUN is the output folder of a run, or a LoRA adapter in PEFT's format. The base is read and written
    tensor by tensor. Afterwards both are run on a short probe, block by block from their files, and the largest
    difference of two logits is shown. Of a multimodal wrapper the text model is written, as a model of its own.
    """
    from poros.export import find_adapter
    from poros.export import merge as merge_adapter
    from poros.run.device import resolve_device
    from poros.units import parse_size
    from poros_cli.adapted import base_of, probe_tokens
    from poros_cli.merge_text import MergeProgress, show_merge
    from poros_cli.output import quiet_libraries
    from poros_cli.terminal import TerminalConsole

    console = TerminalConsole(highlight=False, soft_wrap=True)
    with quiet_libraries(console):
        found = find_adapter(adapter)
        with MergeProgress(console) as progress:
            report = merge_adapter(
                found,
                base_of(found, model),
                output,
                registry=registry,
                base=base,
                quantization=quantization,
                shard_bytes=parse_size(shard_size, "shard_size"),
                device=resolve_device(device),
                probe=probe_tokens,
                progress=progress.advance,
            )
        show_merge(console, report)
