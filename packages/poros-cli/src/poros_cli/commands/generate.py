"""`poros generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from poros_cli.run_options import POSITIVE

if TYPE_CHECKING:
    from poros.plugins import Registry

__all__ = ["generate"]

EPILOG = """\b
Examples:
  poros generate --adapter runs/first --chat "What is the capital of France?"
  poros generate --model ./Qwen2.5-7B "Once upon a time"
  poros generate --model ./Qwen3-32B --adapter runs/first --vram 8GB --chat

\b
The answer goes to stdout, everything else to stderr. Every token brings every block to the device once, so that a
model larger than the GPU answers as slowly as the link copies it: docs/export.md has the arithmetic. To serve a model,
merge it (`poros merge`) or load the adapter with PEFT or vLLM.
"""


@click.command(epilog=EPILOG)
@click.argument("prompt", required=False)
@click.option("--model", metavar="DIR|ID", help="Base model [default: the one that the adapter names].")
@click.option(
    "--adapter",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Output folder of a run, or an adapter in PEFT's format; without one the base answers.",
)
@click.option("--chat", is_flag=True, help="PROMPT is a user's message; without PROMPT, talk line by line.")
@click.option(
    "--max-new-tokens", type=POSITIVE, default=256, show_default=True, metavar="N", help="Tokens at most."
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    metavar="X",
    help="Divides the logits before a token is drawn; 0 takes the likeliest.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, min_open=True, max=1),
    default=1.0,
    show_default=True,
    metavar="X",
    help="Draw among the likeliest tokens that add up to this.",
)
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Seed of the draws.")
@click.option(
    "--quantization",
    metavar="NAME",
    help="Weight format of the base [default: the run's; nf4 where no run tells].",
)
@click.option(
    "--vram",
    metavar="SIZE",
    help="Device memory that may be taken, such as 8GB [default: the least that runs at full speed].",
)
@click.option("--device", default="auto", show_default=True, metavar="auto|cpu|cuda|cuda:N", help="Device.")
@click.option("--cache-dir", metavar="DIR", help="Folder for quantized stores: the second start is faster.")
@click.pass_obj
def generate(
    registry: Registry,
    prompt: str | None,
    model: str | None,
    adapter: Path | None,
    chat: bool,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    quantization: str | None,
    vram: str | None,
    device: str,
    cache_dir: str | None,
) -> None:
    """Answer from a base and an adapter, streamed block by block as in training.

    PROMPT is continued as it stands; with --chat it is a user's message, rendered by the model's chat template.
    Generation ends at the model's own stop tokens.
    """
    from poros.run.generation import Sampling
    from poros.units import parse_size
    from poros_cli.answers import Answerer
    from poros_cli.output import quiet_libraries
    from poros_cli.terminal import TerminalConsole

    if prompt is None and not chat:
        raise click.UsageError("Missing argument 'PROMPT': give a text, or `--chat` to talk line by line.")
    console = TerminalConsole(stderr=True, highlight=False, soft_wrap=True)
    with (
        quiet_libraries(console),
        Answerer(
            registry,
            model=model,
            adapter=adapter,
            quantization=quantization,
            device=device,
            vram_bytes=None if vram is None else parse_size(vram, "vram"),
            cache_dir=cache_dir,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature=temperature, top_p=top_p, seed=seed),
            chat=chat,
            console=console,
        ) as answerer,
    ):
        if prompt is None:
            answerer.talk(sys.stdin)
        elif chat:
            answerer.reply([{"role": "user", "content": prompt}])
        else:
            answerer.continue_text(prompt)
