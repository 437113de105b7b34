"""Holding out a share of the rows, always the same ones for a seed."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Sequence

from poros_data.dataset import Dataset
from poros_data.errors import DataError, explain
from poros_data.report import DataReport, SourceReport
from poros_data.rows import Row, digest_rows

__all__ = ["hold_out"]


def hold_out(dataset: Dataset, fraction: float, *, seed: int) -> tuple[Dataset, Dataset]:
    """Return (rows to train on, rows held out), each in the order of the data set.

    What stands in one line of a file stays together, and so do lines that share a row: nothing that is evaluated
    was trained on. Which lines are held out follows from their tokens and the seed, not from their place.

    Args:
        dataset: all rows.
        fraction: share of the rows to hold out, at least one and never all.
        seed: another one holds out others.

    Raises:
        DataError: the fraction is not between 0 and 1, or all rows are one and the same.
    """
    if not 0 < fraction < 1:
        raise DataError(
            explain("Bad setting `eval_fraction`", expected="a share between 0 and 1", got=fraction)
        )
    groups = _groups(dataset.rows)
    wanted = max(1, round(fraction * len(dataset.rows)))
    chosen: set[int] = set()
    for digest in sorted(groups, key=lambda digest: hashlib.sha256(f"{seed}:{digest}".encode()).digest())[
        :-1
    ]:
        if len(chosen) >= wanted:
            break
        chosen.update(groups[digest])
    if not chosen:
        raise DataError(
            explain(
                "Cannot hold out rows",
                expected="at least two lines that differ",
                got=f"{len(dataset.rows)} rows of one kind",
                next_step="Name held-out rows in `eval_data`, or give more training rows",
            )
        )
    held = [row for index, row in enumerate(dataset.rows) if index in chosen]
    kept = [row for index, row in enumerate(dataset.rows) if index not in chosen]
    named = f"held out: {fraction:g} of the rows, seed {seed}"
    parts = {**dataset.parts, "held_out": f"{fraction!r} {seed} {digest_rows(held)}"}
    return (
        dataclasses.replace(
            dataset,
            rows=tuple(kept),
            report=_training_report(
                dataset.report, kept, f"{named}: {len(held)} rows, {len(kept)} to train on"
            ),
            parts={**parts, "rows": digest_rows(kept)},
        ),
        dataclasses.replace(
            dataset,
            rows=tuple(held),
            report=_held_out_report(dataset.report, held, named),
            parts={**parts, "rows": digest_rows(held)},
        ),
    )


def _groups(rows: Sequence[Row]) -> dict[str, list[int]]:
    """Return the indices of rows that belong together, by a digest of what their first line holds.

    A line's rows belong together, and so do lines that share a row.
    """
    lines: dict[tuple[int, int], list[int]] = {}
    for index, row in enumerate(rows):
        lines.setdefault((row.file, row.line), []).append(index)
    parent = list(range(len(rows)))  # a forest: rows with one root belong together

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = index = parent[parent[index]]
        return index

    first_with: dict[str, int] = {}
    for indices in lines.values():
        for index in indices:
            twin = first_with.setdefault(digest_rows([rows[index]]), index)
            for other in (twin, indices[0]):
                low, high = sorted((root(index), root(other)))
                parent[high] = low
    together: dict[int, list[int]] = {}
    for index in range(len(rows)):
        together.setdefault(root(index), []).append(index)
    return {digest_rows(_first_line(rows, group)): group for group in together.values()}


def _first_line(rows: Sequence[Row], group: Sequence[int]) -> list[Row]:
    first = rows[group[0]]
    return [
        row for row in (rows[index] for index in group) if (row.file, row.line) == (first.file, first.line)
    ]


def _counted(report: DataReport, rows: Sequence[Row]) -> DataReport:
    return dataclasses.replace(
        report,
        num_rows=len(rows),
        supervised_tokens=sum(row.num_supervised for row in rows),
        total_tokens=sum(len(row.input_ids) for row in rows),
        longest_tokens=max(len(row.input_ids) for row in rows),
    )


def _training_report(report: DataReport, rows: Sequence[Row], note: str) -> DataReport:
    """Return the report of all rows, with the numbers of tokens of those that are trained on."""
    return dataclasses.replace(_counted(report, rows), notes=(*report.notes, note))


def _held_out_report(report: DataReport, rows: Sequence[Row], name: str) -> DataReport:
    """Return a report in which the held-out rows are a source of their own; what was dropped is the other's."""
    source = SourceReport(
        name=name, weight=1.0, num_files=1, schemas={"rows": len(rows)}, num_rows=len(rows), ignored=()
    )
    # Like the report of a reading: a power of two -> rows up to that long.
    lengths = Counter(1 << max(0, len(row.input_ids) - 1).bit_length() for row in rows)
    return dataclasses.replace(
        _counted(report, rows),
        sources=(source,),
        schemas=dict(source.schemas),
        dropped={},
        truncated={},
        cut_tokens=0,
        repaired=None,
        lost_turns={},
        lengths=dict(lengths),
        warnings=(),
        notes=(),
    )
