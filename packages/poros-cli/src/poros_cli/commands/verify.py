"""`poros verify`."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["verify"]

EPILOG = """\b
Examples:
  poros verify config.yaml                                  your own run, 4 steps
  poros verify config.yaml --steps 8 --receipt verify.json  for a paper or a bug report
  poros verify ./Qwen2.5-7B                                 a model alone, on random rows
  poros verify config.yaml --inject all                     and check that the check can fail

\b
Every side runs in a process of its own: streamed, the same again, resident, stopped half-way, resumed. Compared are the
rows that were read, every micro-batch's loss, every adapter gradient, weights, both moments, the random state and the
data position, byte for byte after every step. Nothing is written into the run's own output folder.
Faults: early-refill, missing-wait, poisoned-slot, skipped-accumulation, dropped-moment, delayed-copy-stream,
delayed-compute-stream, side-traffic, all. docs/verify.md says what each one must lead to.
Exit codes: 0 equal, 1 different or a fault was not caught, 2 the run cannot be started, 3 cannot compare.
"""


@click.command(epilog=EPILOG)
@click.argument("target", metavar="CONFIG.yaml|MODEL")
@click.option(
    "--steps",
    type=click.IntRange(min=2),
    default=4,
    show_default=True,
    metavar="N",
    help="Optimizer steps to compare.",
)
@click.option(
    "--inject",
    "faults",
    multiple=True,
    metavar="FAULT",
    help="Break the engine on purpose, as often as you like; `all` is every fault.",
)
@click.option(
    "--receipt",
    "receipt_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write JSON.",
)
@click.option(
    "--resident-vram",
    metavar="SIZE",
    help="Device memory that the resident side may take, such as 40GB [default: what is free].",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override any setting of the run, such as micro_batches=4.",
)
@click.option(
    "--scratch",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where recorded steps lie meanwhile: a few times the adapter per step [default: the system's].",
)
def verify(
    target: str,
    steps: int,
    faults: tuple[str, ...],
    receipt_file: Path | None,
    resident_vram: str | None,
    overrides: tuple[str, ...],
    scratch: Path | None,
) -> None:
    """Check on your own run that streaming changes no bit: streamed, repeated, restarted and resident.

    CONFIG.yaml is a config of `poros train`: its model, data, template, adapters, optimizer and plan are run for a few
    steps. A MODEL alone (a local folder or a hub id) runs on random rows, and a folder without weights on random ones.
    """
    import tempfile

    from rich.text import Text

    from poros.units import parse_size
    from poros.verify.controls import choose_controls
    from poros_cli.terminal import TerminalConsole
    from poros_cli.verify.processes import Worker
    from poros_cli.verify.receipt import write_receipt
    from poros_cli.verify.run import verify as run_verify
    from poros_cli.verify.text import show_verification

    controls = choose_controls(faults)
    resident_bytes = None if resident_vram is None else parse_size(resident_vram, "resident-vram")
    console = TerminalConsole(highlight=False, soft_wrap=True)
    if scratch is not None:
        scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="poros-verify-", dir=scratch) as folder:
        found = run_verify(
            Worker(target, overrides, Path(folder)),
            num_steps=steps,
            controls=controls,
            resident_bytes=resident_bytes,
            say=lambda line: console.print(Text(line)),
        )
    show_verification(found, console)
    code = found.exit_code(faults)
    if receipt_file is not None:
        write_receipt(receipt_file, found, code)
        console.print(Text(f"Receipt: {receipt_file}"))
    if code:
        raise click.exceptions.Exit(code)
