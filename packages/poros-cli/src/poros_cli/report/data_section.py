"""What reading the data found, from a run's record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poros_cli.report.curves import NOT_RECORDED
from poros_cli.report.run_files import RunFiles
from poros_data.report import DataReport

__all__ = ["DataSummary", "data_summaries"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSummary:
    """What reading a data set found: sentences, and rows by length with their share of the longest bar."""

    title: str
    lines: Sequence[str]
    lengths: Sequence[tuple[str, str, int]]


def data_summaries(run: RunFiles) -> tuple[list[DataSummary], str]:
    """Return the summaries of the training and the held-out rows, and why there is none."""
    recorded = run.record.get("data")
    if not recorded:
        return [], NOT_RECORDED
    summaries = []
    for name, title in (("training", "Training rows"), ("held_out", "Held-out rows")):
        if not recorded.get(name):
            continue
        try:
            report = DataReport.from_record(recorded[name])
        except (AttributeError, KeyError, TypeError, ValueError):
            summaries.append(
                DataSummary(title=title, lines=["Recorded in a form that is not known here."], lengths=())
            )
            continue
        most = max(report.lengths.values(), default=1)
        lengths = [
            (f"{size} tokens", f"{count} rows", round(100 * count / most))
            for size, count in sorted(report.lengths.items())
        ]
        summaries.append(DataSummary(title=title, lines=report.lines(), lengths=lengths))
    return summaries, "" if recorded.get("held_out") else "There were no held-out rows."
