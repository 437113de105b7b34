"""The page as HTML: one file, no request, no script; everything a user wrote is escaped by the template engine."""

from __future__ import annotations

import importlib.metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from poros.checkpoint import atomic_write_bytes
from poros.errors import CheckpointError, OutputError, explain
from poros_cli.report import sections
from poros_cli.report.curves import training_charts
from poros_cli.report.data_section import data_summaries
from poros_cli.report.memory import memory_charts, terms
from poros_cli.report.run_files import RunFiles
from poros_cli.report.samples import prompt_answers
from poros_cli.report.step_timeline import step_timeline

__all__ = ["MARK", "render", "write_report"]

# The first line of every report: what begins otherwise is not ours to replace.
MARK = "<!doctype html><!-- poros report -->"

# What a value of another type than a run writes leads to, wherever the page uses it.
FORGED = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
    jinja2.TemplateError,
)


def render(run: RunFiles) -> str:
    """Return the page; the same bytes for the same run."""
    record = run.record
    word, sentence = sections.state(run)
    charts, memory_notes = memory_charts(run)
    data, data_note = data_summaries(run)
    platform, receipts = sections.receipts(record)
    fingerprint = record["fingerprint"]
    versions = {k: v for k, v in fingerprint.items() if k.startswith("environment.")}
    here = files("poros_cli") / "report"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string((here / "page.html.tmpl").read_text(encoding="utf-8")).render(
        mark=Markup(MARK),
        style=Markup((here / "page.css").read_text(encoding="utf-8")),
        poros=importlib.metadata.version("poros-cli"),
        run=run,
        name=run.folder.resolve().name,
        model=record["model"],
        word=word,
        sentence=sentence,
        tiles=sections.tiles(run),
        training=training_charts(run),
        memory=charts,
        memory_notes=memory_notes,
        terms=[(where, terms(record, where)) for where in ("device", "host")],
        comparison=sections.comparison(run),
        plan=sections.plan_lines(record),
        timeline=step_timeline(run),
        samples=prompt_answers(run.folder),
        data=data,
        data_note=data_note,
        platform=platform,
        receipts=receipts,
        config=_table(record.get("config") or record["settings"]),
        config_is_whole="config" in record,
        versions=_table(versions, "environment."),
        fingerprint=_table({k: v for k, v in fingerprint.items() if k not in versions}),
        notes=record.get("notes") or [],
    )


def _table(values: Any, prefix: str = "") -> list[tuple[str, str]]:
    shown = {name.removeprefix(prefix): value for name, value in values.items()}
    return [(name, "none" if value is None else str(value)) for name, value in sorted(shown.items())]


def write_report(run: RunFiles, path: Path) -> None:
    """Write the page of a run; an earlier report at ``path`` is replaced.

    Raises:
        CheckpointError: the run's files hold what no run writes.
        OutputError: ``path`` is something else than a report, or cannot be written.
    """
    try:
        with path.open("rb") as file:
            ours = file.read(len(MARK)) == MARK.encode()
    except FileNotFoundError:
        ours = True
    except OSError:
        ours = False
    if not ours or not path.parent.is_dir():
        raise OutputError(
            explain(
                "Cannot write the report",
                expected="a new file in a folder that exists, or an earlier report",
                got="something else under that name" if not ours else "no such folder",
                where=str(path),
                next_step="Name another file with `--output`",
            )
        )
    try:
        page = render(run)
    except FORGED as error:
        got = f"{type(error).__name__}: {error}"[:200]
        raise CheckpointError(
            explain(
                "Cannot report",
                expected="files that a run of Poros wrote",
                got=f"a value that none has ({got})",
                where=str(run.folder),
            )
        ) from error
    # A path may hold bytes that are no text; they are shown as escapes instead of failing.
    atomic_write_bytes(path, page.encode("utf-8", errors="backslashreplace"))
