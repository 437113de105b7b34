"""The flags of `poros train` and the settings that they stand for. Every setting without a flag has `--set`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from poros.settings import ACCUMULATION_ORDERS
from poros_cli.config import RunConfig
from poros_cli.config_file import load_config
from poros_cli.schema import settings
from poros_data import TRUNCATIONS

__all__ = ["FLAGS", "PLANNED", "POSITIVE", "config_arguments", "config_from", "given_flags", "split_names"]


def split_names(
    _ctx: click.Context, _parameter: click.Parameter, value: str | None
) -> tuple[str, ...] | None:
    """Return the names of a comma-separated option. A click callback."""
    return None if value is None else tuple(name.strip() for name in value.split(",") if name.strip())


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: the setting it stands for and its click declaration."""

    path: str
    flag: str
    help: str
    type: Any = str
    metavar: str | None = None
    is_flag: bool = False
    callback: Callable[..., Any] | None = None

    @property
    def parameter(self) -> str:
        """The name under which click passes the value."""
        return self.flag.removeprefix("--").replace("-", "_")


POSITIVE = click.IntRange(min=1)
PLANNED = "[default: the planner's choice]"
FLAGS = (
    Flag("model", "--model", "Base model: a local folder or a hub id.", metavar="DIR|ID"),
    Flag("data", "--data", "Training rows: a file, a folder of files or a hub id.", metavar="FILE|DIR|ID"),
    Flag("output", "--output", "Folder for checkpoints, metrics and the adapter.", metavar="DIR"),
    Flag("eval_data", "--eval-data", "Held-out rows, JSONL.", metavar="FILE"),
    Flag(
        "eval_fraction",
        "--eval-fraction",
        "Share of the training rows to hold out instead.",
        type=float,
        metavar="X",
    ),
    Flag("quantization", "--quantization", "Weight format of the frozen base.", metavar="NAME"),
    Flag("device", "--device", "Device.", metavar="auto|cpu|cuda|cuda:N"),
    Flag("seed", "--seed", "Seed of adapters, order of rows and dropout.", type=int, metavar="N"),
    Flag("max_steps", "--max-steps", "Optimizer steps at most.", type=POSITIVE, metavar="N"),
    Flag(
        "epochs",
        "--epochs",
        "Passes over the data at most [default: 1, or what --max-steps needs].",
        type=POSITIVE,
        metavar="N",
    ),
    Flag(
        "micro_batch_size", "--micro-batch-size", "Rows that go through together.", type=POSITIVE, metavar="N"
    ),
    Flag("micro_batches", "--micro-batches", "Micro-batches per optimizer step.", type=POSITIVE, metavar="N"),
    Flag("max_length", "--max-length", "Tokens per row at most.", type=POSITIVE, metavar="N"),
    Flag(
        "rows.truncation",
        "--truncation",
        "What becomes of rows with more tokens.",
        type=click.Choice(TRUNCATIONS),
    ),
    Flag("rows.template", "--template", "Chat template to use instead of the tokenizer's.", metavar="FILE"),
    Flag("lora.rank", "--rank", "Adapter rank.", type=POSITIVE, metavar="N"),
    Flag("lora.alpha", "--alpha", "Adapter scaling numerator.", type=float, metavar="X"),
    Flag("lora.dropout", "--dropout", "Dropout on adapter inputs.", type=float, metavar="X"),
    Flag(
        "lora.targets",
        "--targets",
        "Linear layers to adapt, by leaf name.",
        metavar="A,B,...",
        callback=split_names,
    ),
    Flag("optimizer.learning_rate", "--learning-rate", "Peak learning rate.", type=float, metavar="X"),
    Flag(
        "plan.residency",
        "--residency",
        f"Where the base lives {PLANNED}.",
        type=click.Choice(("streamed", "resident")),
    ),
    Flag(
        "plan.slots",
        "--slots",
        f"Device slots for streamed blocks {PLANNED}.",
        type=click.IntRange(min=2),
        metavar="N",
    ),
    Flag(
        "plan.order",
        "--order",
        f"Order of gradient accumulation {PLANNED}.",
        type=click.Choice(ACCUMULATION_ORDERS),
    ),
    Flag("save_every", "--save-every", "Optimizer steps between checkpoints.", type=POSITIVE, metavar="N"),
    Flag("eval_every", "--eval-every", "Optimizer steps between evaluations.", type=POSITIVE, metavar="N"),
    Flag(
        "keep_best",
        "--keep-best",
        "Keep the checkpoint with the lowest held-out loss; the final adapter is that one.",
        is_flag=True,
    ),
    Flag(
        "early_stop_patience",
        "--early-stop-patience",
        "Evaluations in a row without improvement that end the run.",
        type=POSITIVE,
        metavar="N",
    ),
    Flag(
        "report_to",
        "--report-to",
        "Reporters besides metrics.jsonl, such as tensorboard,wandb.",
        metavar="A,B,...",
        callback=split_names,
    ),
    Flag("resume", "--resume", "Go on from the newest complete checkpoint in --output.", is_flag=True),
    Flag("overwrite", "--overwrite", "Empty a used --output first.", is_flag=True),
    Flag(
        "cache_dir",
        "--cache-dir",
        "Folder for quantized stores and tokenized rows: the second start is faster.",
        metavar="DIR",
    ),
    Flag(
        "vram",
        "--vram",
        "Device memory that the run may take, such as 8GB [default: the least that runs at full speed].",
        metavar="SIZE",
    ),
    Flag(
        "ram",
        "--ram",
        "Host memory that the run may take, such as 24GB [default: what is free].",
        metavar="SIZE",
    ),
)


def config_arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the config file, `--set` and every flag to a click command. A decorator."""
    for flag in reversed(FLAGS):
        # None, not False, where nothing was said: an absent flag must not override the file.
        shape: dict[str, Any] = (
            {"is_flag": True} if flag.is_flag else {"type": flag.type, "metavar": flag.metavar}
        )
        text = f"{flag.help.removesuffix('.')}{_default(flag.path)}."
        command = click.option(flag.flag, default=None, help=text, callback=flag.callback, **shape)(command)
    command = click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Override any setting, such as lora.rank=8.",
    )(command)
    file = click.Path(dir_okay=False, path_type=Path)
    return click.argument("config_file", metavar="[CONFIG.yaml]", required=False, type=file)(command)


def _default(path: str) -> str:
    default = settings()[path].default
    return "" if default in (None, False, ()) else f" [default: {default}]"


def config_from(config_file: Path | None, overrides: tuple[str, ...], values: dict[str, Any]) -> RunConfig:
    """Return the settings from what click parsed: the file, then ``--set``, then flags.

    Args:
        config_file: YAML file or None.
        overrides: every ``--set``.
        values: the flags' values by parameter name; None where a flag was not given.
    """
    return load_config(config_file, overrides=overrides, flags=given_flags(values))


def given_flags(values: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return, by setting, the name and value of every flag that was given."""
    return {f.path: (f.flag, values[f.parameter]) for f in FLAGS if values.get(f.parameter) is not None}
