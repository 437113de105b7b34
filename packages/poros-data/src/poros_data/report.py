"""What reading a data set found, for the user's eyes and the run's record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Count", "DataReport"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """How many, and the line of the first."""

    count: int
    first_line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DataReport:
    """The summary of a data set.

    Attributes:
        path: the file.
        num_rows: rows kept.
        schemas: rows read per format, kept or not.
        dropped: rows left out, by reason.
        lost_turns: turns whose text did not (completely) survive the chat template, by role.
        supervised_tokens, total_tokens: over the rows kept.
        longest_tokens: tokens of the longest row kept.
        last_supervised_token: the text of the last supervised token of the first row kept.
        warnings: sentences that the user should see.
    """

    path: str
    num_rows: int
    schemas: Mapping[str, int]
    dropped: Mapping[str, Count]
    lost_turns: Mapping[str, Count]
    supervised_tokens: int
    total_tokens: int
    longest_tokens: int
    last_supervised_token: str
    warnings: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the summary as lines of text, warnings last."""
        formats = ", ".join(f"{count} {name}" for name, count in self.schemas.items())
        num_read = sum(self.schemas.values())
        share = 100 * self.supervised_tokens / self.total_tokens
        lines = [
            f"{self.path}: {self.num_rows} of {num_read} rows used ({formats})",
            f"{self.supervised_tokens} of {self.total_tokens} tokens are supervised ({share:.1f} %), "
            f"the longest row has {self.longest_tokens}, row 0 ends with {self.last_supervised_token!r}",
        ]
        lines += [
            f"dropped {c.count} rows: {reason} (first: line {c.first_line})"
            for reason, c in self.dropped.items()
        ]
        return lines + [f"warning: {warning}" for warning in self.warnings]
