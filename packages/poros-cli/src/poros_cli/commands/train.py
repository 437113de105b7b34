"""`poros train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from poros_cli.run_options import config_arguments, config_from

if TYPE_CHECKING:
    from poros.plugins import Registry

__all__ = ["train"]

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
    from poros.errors import PorosError
    from poros_cli.config import check_quantization
    from poros_cli.device import refuse_many_processes, resolve_device

    refuse_many_processes()
    config = config_from(config_file, overrides, flags)
    check_quantization(config.quantization, registry.weight_formats)
    resolve_device(config.device)
    raise PorosError("`poros train` is not connected to the engine yet.")
