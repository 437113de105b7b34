"""What reading a data set found, for the user's eyes and the run's record."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["NOTHING_LEFT", "NOTHING_SUPERVISED", "TOO_LONG", "Count", "DataReport", "SourceReport"]

# Why rows are dropped.
TOO_LONG = "longer than max_length"
NOTHING_LEFT = "no supervised token left after truncation"
NOTHING_SUPERVISED = "no supervised token"
# What to do about it; the first one that a reason begins with.
NEXT_STEPS = (
    (TOO_LONG, "raise `max_length`, or cut rows with `rows.truncation`"),
    (NOTHING_LEFT, "raise `max_length`, or keep the other end with `rows.truncation`"),
    (NOTHING_SUPERVISED, "give them an assistant turn with text"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """How many, and where the first is.

    Attributes:
        first_line: 1-based line or row in its file.
        first: the same in words: ``line 3``, or with its file where there are several.
    """

    count: int
    first_line: int
    first: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceReport:
    """What one source brought.

    Attributes:
        name: as the user wrote it.
        weight: how often each of its rows comes in an epoch.
        num_files: files that were read.
        schemas: rows read per format, kept or not.
        num_rows: rows kept (pieces of split text count one by one).
        ignored: files of a folder that are no data.
    """

    name: str
    weight: float
    num_files: int
    schemas: Mapping[str, int]
    num_rows: int
    ignored: tuple[str, ...]

    @property
    def num_read(self) -> int:
        """Rows that were read."""
        return sum(self.schemas.values())

    def line(self) -> str:
        """Return the source's summary."""
        formats = ", ".join(f"{count} {name}" for name, count in self.schemas.items())
        weight = "" if self.weight == 1 else f", weight {self.weight:g}"
        files = "" if self.num_files == 1 else f", {self.num_files} files"
        return f"{self.name}: {self.num_rows} of {self.num_read} rows used ({formats}{files}{weight})"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataReport:
    """The summary of a data set.

    Attributes:
        sources: what each source brought.
        num_rows: rows kept.
        schemas: rows read per format over all sources, kept or not.
        dropped: rows left out, by reason.
        truncated: rows that were cut, by policy.
        cut_tokens: tokens that were cut off them.
        repaired: rows whose turns were merged for the template; None for none.
        lost_turns: turns whose text did not (completely) survive the chat template, by role.
        supervised_tokens, total_tokens: over the rows kept.
        longest_tokens: tokens of the longest row kept.
        lengths: rows read by their length before any cut: a power of two -> rows up to that long, above its half.
        last_supervised_token: the text of the last supervised token of the first row kept.
        last_supervised_id: its id; None where truncation cut the row's end off.
        warnings: sentences that the user should see.
        notes: sentences that the user may want to see.
    """

    sources: tuple[SourceReport, ...]
    num_rows: int
    schemas: Mapping[str, int]
    dropped: Mapping[str, Count]
    truncated: Mapping[str, Count]
    cut_tokens: int
    repaired: Count | None
    lost_turns: Mapping[str, Count]
    supervised_tokens: int
    total_tokens: int
    longest_tokens: int
    lengths: Mapping[int, int]
    last_supervised_token: str
    last_supervised_id: int | None
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the summary as lines of text, warnings last."""
        share = 100 * self.supervised_tokens / self.total_tokens
        lines = [source.line() for source in self.sources]
        lines.append(
            f"{self.supervised_tokens} of {self.total_tokens} tokens are supervised ({share:.1f} %), "
            f"the longest row has {self.longest_tokens}, row 0 ends with {self.last_supervised_token!r}"
        )
        for source in self.sources:
            if source.ignored:
                names = ", ".join(source.ignored[:3]) + (", ..." if len(source.ignored) > 3 else "")
                lines.append(f"no data in {len(source.ignored)} files of {source.name}: {names}")
        lines += [
            f"dropped {c.count} rows: {reason} (first: {c.first}){_next_step(reason)}"
            for reason, c in self.dropped.items()
        ]
        lines += [
            f"{policy} cut {c.count} rows, {self.cut_tokens} tokens left out (first: {c.first})"
            if policy != "split"
            else f"split {c.count} rows into pieces (first: {c.first})"
            for policy, c in self.truncated.items()
        ]
        if self.repaired is not None:
            count = self.repaired
            lines.append(f"merged turns of {count.count} rows for the chat template (first: {count.first})")
        return [*lines, *self.notes, *(f"warning: {warning}" for warning in self.warnings)]

    def record(self) -> dict[str, Any]:
        """Return the summary as JSON values; `from_record` reads it back."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> DataReport:
        """Return the report that `record` was made from, after a way through JSON."""
        values = dict(record)
        values["sources"] = tuple(
            SourceReport(**{**source, "ignored": tuple(source["ignored"])}) for source in values["sources"]
        )
        for name in ("dropped", "truncated", "lost_turns"):
            values[name] = {key: Count(**count) for key, count in values[name].items()}
        values["repaired"] = None if values["repaired"] is None else Count(**values["repaired"])
        values["lengths"] = {int(length): count for length, count in values["lengths"].items()}
        return DataReport(
            **{**values, "warnings": tuple(values["warnings"]), "notes": tuple(values["notes"])}
        )


def _next_step(reason: str) -> str:
    # A record may come from another version.
    return next((f"; {step}" for beginning, step in NEXT_STEPS if reason.startswith(beginning)), "")
