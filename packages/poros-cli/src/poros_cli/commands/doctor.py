"""`poros doctor`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from poros.errors import PluginError
    from poros.plugins import Registry

__all__ = ["doctor"]

EPILOG = """\b
Examples:
  poros doctor
  poros doctor --json > doctor.json          attach it to a bug report
  poros doctor --device cuda:1 --pin-probe-gib 64

\b
Exit code 0 without problems (a machine without a GPU is none), 2 otherwise.
"""


@click.command(epilog=EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="auto|cpu|cuda|cuda:N",
    help="Device to measure on.",
)
@click.option(
    "--pin-probe-gib",
    type=click.IntRange(min=0),
    default=16,
    show_default=True,
    help="Page-lock at most this much host memory to find the limit; it is freed again.",
)
@click.pass_obj
def doctor(plugins: Registry | PluginError, as_json: bool, device: str, pin_probe_gib: int) -> None:
    """Show what this machine can do, by trying it.

    Versions, devices, the measured host-to-device link, how much host memory can be page-locked, a real NF4 round
    trip through bitsandbytes, and the plugins that are loaded.
    """
    from poros_cli.doctor import collect_facts, show_facts
    from poros_cli.terminal import TerminalConsole

    facts = collect_facts(plugins, device, pin_probe_gib * 2**30)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        show_facts(facts, TerminalConsole())
    if facts["problems"]:
        raise click.exceptions.Exit(2)
