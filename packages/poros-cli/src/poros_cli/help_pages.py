"""The built-in commands' help as text, for docs/cli.md. The same wherever it is generated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import click

from poros_cli.main import make_group
from poros_cli.plugin import poros_register_commands

__all__ = ["help_pages"]

WIDTH = 100


def help_pages() -> Iterator[tuple[str, str]]:
    """Yield (command line, help text) of ``poros`` and of every built-in command."""
    commands = {str(command.name): command for command in poros_register_commands()}
    group = make_group(commands)
    parent = group.make_context(
        "poros", [], resilient_parsing=True, terminal_width=WIDTH, max_content_width=WIDTH
    )
    yield "poros", group.get_help(parent).rstrip()
    yield from _pages(commands, parent, "poros")


def _pages(
    commands: Mapping[str, click.Command], parent: click.Context, prefix: str
) -> Iterator[tuple[str, str]]:
    for name, command in sorted(commands.items()):
        # Contexts take their width from the parent; an argument that is missing is no reason to refuse help.
        context = command.make_context(name, [], parent=parent, resilient_parsing=True)
        yield f"{prefix} {name}", command.get_help(context).rstrip()
        if isinstance(command, click.Group):
            yield from _pages(command.commands, context, f"{prefix} {name}")
