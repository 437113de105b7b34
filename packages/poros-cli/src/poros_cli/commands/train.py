"""`poros train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from poros_cli.run_options import config_arguments, config_from

if TYPE_CHECKING:
    from poros.plugins import Registry

__all__ = ["train"]

EXIT_INTERRUPTED = 130

EPILOG = """\b
Examples:
  poros train examples/quickstart.yaml
  poros train config.yaml --max-steps 20 --set lora.rank=8 --set optimizer.schedule=cosine
  poros train --model ./Qwen2.5-7B --data rows.jsonl --output runs/first
  poros train config.yaml --resume                     go on after an interruption
  poros train config.yaml --residency resident         the same bits without streaming, if it fits

\b
Precedence: flags over --set over the file. docs/config.md lists every setting.
Ctrl-C finishes the optimizer step, saves and exits with 130; a second one exits at once.
"""


@click.command(epilog=EPILOG)
@config_arguments
@click.pass_obj
def train(registry: Registry, config_file: Path | None, overrides: tuple[str, ...], **flags: Any) -> None:
    """Train a LoRA adapter on a frozen base that is streamed block by block.

    Settings come from CONFIG.yaml, from flags, or both. Where the base lives (--residency, --slots, --order)
    never changes a bit of the result.
    """
    config = config_from(config_file, overrides, flags)  # a typo is answered before seconds of imports
    from poros_cli.assemble import assemble
    from poros_cli.output import ProgressReporter, quiet_libraries, show_summary
    from poros_cli.terminal import TerminalConsole

    console = TerminalConsole(highlight=False, soft_wrap=True)
    with (
        quiet_libraries(console),
        ProgressReporter(console) as progress,
        assemble(config, registry, reporters=(progress,), say=progress.say).trainer as trainer,
    ):
        result = trainer.run()
    show_summary(console, result)
    if result.interrupted:
        raise click.exceptions.Exit(EXIT_INTERRUPTED)
