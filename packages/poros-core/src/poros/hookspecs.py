"""The hooks of a Poros plugin. Each docstring is the hook's contract.

A plugin is a module named in the entry-point group ``poros``. Every command imports it, ``poros --help`` too: what
takes time to import is imported inside the hooks. A hook runs once, before a run begins; the training loop never calls
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import click

    from poros.interfaces import Architecture, ParityCase, RunAssembler, WeightFormat
    from poros.run.events import Reporter

__all__ = ["hookimpl", "hookspec"]

hookspec = pluggy.HookspecMarker("poros")
hookimpl = pluggy.HookimplMarker("poros")


@hookspec
def poros_register_architectures() -> Sequence[type[Architecture]]:  # type: ignore[empty-body]
    """Return the architecture classes that this plugin brings.

    Called once, when a command first needs an architecture. Results of all plugins are joined; two plugins that claim
    one ``name`` or one ``model_type`` are an error naming both distributions. Return an empty sequence for none. A
    class from a distribution that Poros does not gate itself is ``user_asserted``: it runs with a warning and without
    any claim of bitwise equality.
    """


@hookspec
def poros_register_weight_formats() -> Sequence[type[WeightFormat]]:  # type: ignore[empty-body]
    """Return the weight format classes that this plugin brings.

    Called once, when a command first needs a format. Results are joined; a duplicate ``name`` is an error naming both
    distributions. Return an empty sequence for none. Raise `FormatError` inside the format, not here, when a
    library is unusable.
    """


@hookspec
def poros_register_parity_cases() -> Sequence[ParityCase]:  # type: ignore[empty-body]
    """Return the parity cases that gate this plugin's architectures.

    Called once, only when gates run. Results are joined; a duplicate case ``name`` is an error naming both
    distributions. Return an empty sequence for none.
    """


@hookspec
def poros_register_commands() -> Sequence[click.Command]:  # type: ignore[empty-body]
    """Return click commands to add to ``poros``.

    Called once when the command line starts. Results are joined; a duplicate command name is an error naming both
    distributions. Return an empty sequence for none.
    """


@hookspec
def poros_register_assemblers() -> Sequence[RunAssembler]:  # type: ignore[empty-body]
    """Return the callable with which this plugin makes a trainer from a run's config.

    Called once per `poros.train`. There is one assembler: a second is an error naming both distributions. Return an
    empty sequence for none. ``poros-cli`` brings it, because it is the one that knows configs, tokenizers and rows.
    """


@hookspec
def poros_register_reporters() -> Sequence[type[Reporter]]:  # type: ignore[empty-body]
    """Return the reporter classes that this plugin brings: `poros.Reporter` with a ``name``.

    Called once, when a run names a reporter in ``report_to``. Results are joined; a duplicate ``name`` is an error
    naming both distributions. Return an empty sequence for none. A class whose library is missing says so when it is
    made, not here.
    """
