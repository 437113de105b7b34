"""The plugin that registers the built-in commands, through the same door as anybody else's."""

from __future__ import annotations

import click

from poros.hookspecs import hookimpl
from poros_cli.commands.bench import bench
from poros_cli.commands.check import check
from poros_cli.commands.config import config
from poros_cli.commands.data import data
from poros_cli.commands.doctor import doctor
from poros_cli.commands.generate import generate
from poros_cli.commands.merge import merge
from poros_cli.commands.new_arch import new_arch
from poros_cli.commands.quickstart import quickstart
from poros_cli.commands.report import report
from poros_cli.commands.train import train

__all__ = ["poros_register_commands"]


@hookimpl
def poros_register_commands() -> list[click.Command]:
    """Return the built-in commands."""
    return [bench, check, config, data, doctor, generate, merge, new_arch, quickstart, report, train]
