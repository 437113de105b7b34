"""`poros report`."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["report"]

EPILOG = """\b
Examples:
  poros report runs/first
  poros report runs/first --output first.html
"""


@click.command(epilog=EPILOG)
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Page to write [default: report.html in RUN]. An earlier report is replaced.",
)
def report(run: Path, output: Path | None) -> None:
    """Write one HTML page about a run: curves, memory against the plan, one step, data, settings.

    RUN is the output folder of `poros train`, also of a run that is going on or has failed. The page asks for nothing:
    no script, no network. It holds the paths and names of the config as they are.
    """
    from poros.run.record import REPORT_FILE
    from poros_cli.report import read_run, write_report

    path = run / REPORT_FILE if output is None else output
    write_report(read_run(run), path)
    click.echo(f"Wrote {path}.")
