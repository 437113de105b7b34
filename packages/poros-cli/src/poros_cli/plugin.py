"""The plugin that registers the built-in commands and reporters, through the same door as anybody else's."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from poros_cli.commands.verify import verify

if TYPE_CHECKING:
    from poros.interfaces import RunAssembler
    from poros.run import Reporter

__all__ = ["poros_register_assemblers", "poros_register_commands", "poros_register_reporters"]


@hookimpl
def poros_register_commands() -> list[click.Command]:
    """Return the built-in commands."""
    return [bench, check, config, data, doctor, generate, merge, new_arch, quickstart, report, train, verify]


@hookimpl
def poros_register_assemblers() -> list[RunAssembler]:
    """Return what `poros.train` makes its trainer with."""
    from poros_cli.python_api import make_trainer

    return [make_trainer]


@hookimpl
def poros_register_reporters() -> list[type[Reporter]]:
    """Return the built-in reporters."""
    from poros_cli.reporters import TensorBoardReporter, WandbReporter  # the training loop comes with them

    return [TensorBoardReporter, WandbReporter]
