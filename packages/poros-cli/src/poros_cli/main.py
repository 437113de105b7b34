"""The ``poros`` command: a click group made from the registry, and how errors reach the user."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import click

__all__ = ["Poros", "main", "make_group", "run"]

# A value of a damaged file that a message quotes may be as long as the file.
MAX_MESSAGE_CHARACTERS = 4000
DEBUG_VARIABLE = "POROS_DEBUG"
EXIT_FAILURE, EXIT_USER, EXIT_INTERRUPTED = 1, 2, 130

EPILOG = """\b
Start here:
  poros doctor                        what this machine can do
  poros check Qwen/Qwen2.5-7B         whether a model fits, before loading it
  poros quickstart --output runs/qs   a small real run from end to end
  poros train config.yaml             train a LoRA adapter
  poros report runs/first             one page about a run, while it goes on or after

\b
Exit codes: 0 done, 1 failed, 2 your input or environment, 3 cannot compare, 130 interrupted after a clean save.
POROS_PLUGINS=a,b loads only these plugins; POROS_DEBUG=1 shows tracebacks.
"""


class Poros(click.Group):
    """The top-level group; an unknown command says whether ``POROS_PLUGINS`` may be why."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if limited := os.environ.get("POROS_PLUGINS"):
                hint = f"`POROS_PLUGINS={limited}` limits the plugins; built-in commands need `cli` in it."
                raise click.UsageError(f"{error.message} {hint}", ctx) from error
            raise


def main() -> None:
    """Run ``poros`` with the process's arguments and exit with its code."""
    # Before torch loads its threads: waiting ones that spin steal the cores of whatever else runs on a small machine (a
    # step of the quickstart took 2.5 times as long with two busy neighbours on two cores). Changes no bit.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if not sys.stderr.isatty():
        # Bars of libraries (tqdm reads this when it is imported): in a file they are a line for every refresh.
        for variable in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(variable, "1")
    if not sys.warnoptions:
        # What libraries announce for their next versions is for developers: -W or PYTHONWARNINGS shows it.
        warnings.simplefilter("ignore", FutureWarning)
    warnings.showwarning = _show_warning
    sys.exit(run(sys.argv[1:]))


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    from poros_cli.terminal import printable

    click.echo(f"Warning: {printable(str(message), max_characters=MAX_MESSAGE_CHARACTERS)}", err=True)


def run(arguments: Sequence[str]) -> int:
    """Run ``poros`` and return the exit code; every error becomes one message on stderr.

    Args:
        arguments: command line without the program's name.
    """
    try:
        _invoke(list(arguments))
        sys.stdout.flush()  # a closed pipe shows here, not in the interpreter's last breath
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted.", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader left (`poros doctor | head`); what is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except Exception as error:
        return _report(error)
    return 0


def make_group(commands: Mapping[str, click.Command]) -> Poros:
    """Return the ``poros`` group over ``commands``."""
    group = Poros(
        "poros",
        commands=dict(commands),
        help="Fine-tune LoRA adapters on language models larger than GPU memory.",
        epilog=EPILOG,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    return click.version_option(package_name="poros-cli", prog_name="poros")(group)


def _invoke(arguments: list[str]) -> None:
    from poros.errors import PluginError
    from poros.plugins import load_plugins

    group: Poros
    context: Any
    try:
        context = load_plugins()
        commands = context.commands()
        group = make_group({name: commands[name].value for name in sorted(commands)})
    except PluginError as error:
        if arguments[:1] != ["doctor"]:
            raise
        # The one command that must work when plugins do not: it shows the error beside everything else.
        from poros_cli.commands.doctor import doctor

        context, group = error, make_group({"doctor": doctor})
    with group.make_context("poros", arguments, obj=context) as ctx:
        group.invoke(ctx)


def _report(error: Exception) -> int:
    """Print an error and return its exit code. Errors raised on purpose carry ``exit_code``."""
    from poros_cli.terminal import printable

    code = getattr(error, "exit_code", None)
    if code is None and _is_out_of_host_memory(error):
        message = (
            "Host memory ran out. Free some, or raise the limit of this process, container or control group."
        )
        click.echo(f"Error: {message} ({' '.join(str(error).split()) or type(error).__name__})", err=True)
        return EXIT_USER
    said = printable(str(error), max_characters=MAX_MESSAGE_CHARACTERS)
    if os.environ.get(DEBUG_VARIABLE) == "1":
        traceback.print_exception(error)
    elif isinstance(code, int):
        click.echo(f"{_label(error)}: {said}", err=True)
    else:
        message = f"Unexpected error: {type(error).__name__}: {said}."
        click.echo(f"{message} `{DEBUG_VARIABLE}=1` shows the traceback; please report it.", err=True)
    return code if isinstance(code, int) else EXIT_FAILURE


def _is_out_of_host_memory(error: Exception) -> bool:
    from poros.run.guards import is_out_of_host_memory

    return is_out_of_host_memory(error)


def _label(error: Exception) -> str:
    """Return the first word of a message: an architecture that the gate does not let pass is refused."""
    from poros.errors import ArchitectureError

    return "Refused" if isinstance(error, ArchitectureError) else "Error"
