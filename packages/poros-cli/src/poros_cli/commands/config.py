"""`poros config`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from poros_cli.run_options import config_arguments, given_flags

__all__ = ["config"]

EPILOG = """\b
Examples:
  poros config init run.yaml --model ./Qwen2.5-7B --data rows.jsonl
  poros config show run.yaml
"""

INIT_EPILOG = """\b
Examples:
  poros config init
  poros config init run.yaml --model ./Qwen2.5-7B --data rows.jsonl --output runs/first
"""

SHOW_EPILOG = """\b
Examples:
  poros config show run.yaml
  poros config show run.yaml --set lora.rank=8 --max-steps 20
  poros config show run.yaml > resolved.yaml           the same run, whatever the defaults become
"""


@click.group(epilog=EPILOG)
def config() -> None:
    """Write a config file, or see what one comes to."""


@config.command(epilog=INIT_EPILOG)
@click.argument("file", default="poros.yaml", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--model", metavar="DIR|ID", help="Base model.")
@click.option("--data", metavar="FILE|DIR|ID", help="Training rows.")
@click.option("--output", metavar="DIR", help="Folder for checkpoints, metrics and the adapter.")
def init(file: Path, **values: str | None) -> None:
    """Write a commented config with every setting to FILE [default: poros.yaml].

    An existing file is never overwritten.
    """
    from poros.errors import OutputError, explain
    from poros_cli.config_text import written_template

    text = written_template({name: value for name, value in values.items() if value is not None})
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        exists = isinstance(error, FileExistsError)
        raise OutputError(
            explain(
                "Cannot write the config",
                expected="a new file in a folder that exists",
                got="a file that is there already" if exists else error.strerror or error,
                where=str(file),
                next_step="Name another file",
            )
        ) from error
    click.echo(f"Wrote {file}. Look at the rows with `poros data preview {file}`, then `poros train {file}`.")


@config.command(epilog=SHOW_EPILOG)
@config_arguments
def show(config_file: Path | None, overrides: tuple[str, ...], **flags: Any) -> None:
    """Print every setting that `poros train` would use, and where it came from.

    The output is a config file itself: each value has its file and line, `--set`, flag or `default` as a comment.
    """
    from poros_cli.config_file import resolve_config
    from poros_cli.config_text import resolved_lines
    from poros_cli.terminal import printable

    resolved, given = resolve_config(config_file, overrides=overrides, flags=given_flags(flags))
    for line in resolved_lines(resolved, given):
        click.echo(printable(line))
