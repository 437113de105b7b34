"""`poros data`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from poros_cli.run_options import POSITIVE
from poros_data import TRUNCATIONS

if TYPE_CHECKING:
    from poros_cli.config import RunConfig

__all__ = ["data"]

CONFIG_SUFFIXES = (".yaml", ".yml")

EPILOG = """\b
Examples:
  poros data preview rows.jsonl --model ./Qwen2.5-7B
"""

PREVIEW_EPILOG = """\b
Examples:
  poros data preview rows.jsonl --model ./Qwen2.5-7B
  poros data preview chats.json books/ --model ./Qwen2.5-7B --max-length 4096 --rows 5
  poros data preview config.yaml                       with the settings of a run

\b
No weights are loaded; of a hub model everything else is downloaded. NO_COLOR=1 marks supervised text with [[ ]].
"""


@click.group(epilog=EPILOG)
def data() -> None:
    """Look at training data before anything is trained on it."""


@data.command(epilog=PREVIEW_EPILOG)
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option("--model", metavar="DIR|ID", help="Model whose tokenizer and chat template are used.")
@click.option("--max-length", type=POSITIVE, metavar="N", help="Tokens per row at most [default: 1024].")
@click.option(
    "--truncation", type=click.Choice(TRUNCATIONS), help="What becomes of longer rows [default: drop]."
)
@click.option("--template", metavar="FILE", help="Chat template to use instead of the tokenizer's.")
@click.option("--repair", is_flag=True, default=None, help="Merge turns that the template refuses.")
@click.option(
    "--rows", "num_rows", type=POSITIVE, default=3, show_default=True, metavar="N", help="Rows to show."
)
def preview(files: tuple[str, ...], num_rows: int, **flags: Any) -> None:
    """Show the rows of FILE as the model will see them, and what was dropped and why.

    FILE is a data file, a folder, a hub id, or the config of a run. Supervised tokens are highlighted; token counts, a
    histogram of lengths, and a warning where the model would not stop at the end of a row.
    """
    from poros.checkpoint import resolve_model
    from poros_cli.data_preview import show_preview
    from poros_cli.output import quiet_libraries
    from poros_cli.stop_token import stop_token_warnings
    from poros_cli.terminal import TerminalConsole
    from poros_cli.tokenizer import load_tokenizer, stop_token_ids
    from poros_data import load_dataset

    config = _config(files, flags)
    console = TerminalConsole(highlight=False, soft_wrap=True)
    with quiet_libraries(console):
        folder = resolve_model(config.model, weights=False)
        tokenizer = load_tokenizer(folder)
        dataset = load_dataset(
            config.data,
            tokenizer,
            max_length=config.max_length,
            settings=config.rows,
            stop_token_ids=stop_token_ids(folder),
        )
    show_preview(
        console,
        dataset,
        tokenizer,
        num_rows=num_rows,
        max_length=config.max_length,
        warnings=tuple(stop_token_warnings(folder, tokenizer, dataset.report.last_supervised_id)),
    )


def _config(files: tuple[str, ...], flags: dict[str, Any]) -> RunConfig:
    """Return the settings that a run of these files would have; flags win over a config file."""
    from poros_cli.config_file import load_config

    paths = {
        "model": ("model", "--model"),
        "max_length": ("max_length", "--max-length"),
        "truncation": ("rows.truncation", "--truncation"),
        "template": ("rows.template", "--template"),
        "repair": ("rows.repair", "--repair"),
    }
    given = {paths[name][0]: (paths[name][1], value) for name, value in flags.items() if value is not None}
    if len(files) == 1 and Path(files[0]).suffix.lower() in CONFIG_SUFFIXES:
        return load_config(Path(files[0]), flags=given)
    if flags["model"] is None:
        raise click.UsageError(
            "Missing option '--model': its tokenizer and chat template decide what rows become."
        )
    # Nothing is written: the required output folder is a formality here.
    given |= {"data": ("FILE", files), "output": ("FILE", ".")}
    return load_config(None, flags=given)
