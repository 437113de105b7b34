"""Tokenized rows."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["IGNORED", "Row", "digest_rows"]

# The label of a token that is not supervised; what `torch.nn.functional.cross_entropy` ignores.
IGNORED = -100


@dataclass(frozen=True, slots=True)
class Row:
    """One tokenized example.

    Attributes:
        input_ids: (T,) token ids, without padding.
        labels: (T,), the id at the same position (*not* shifted) or -100 where it is not supervised. Position
            0 is always -100: nothing comes before it that could predict it.
        line: 1-based line of the data file; of a table, its row.
        file: index of that file in `poros_data.Dataset.files`.
    """

    input_ids: Sequence[int]
    labels: Sequence[int]
    line: int
    file: int = 0

    @property
    def num_supervised(self) -> int:
        """Supervised tokens of the row."""
        return len(self.labels) - self.labels.count(IGNORED)


def digest_rows(rows: Iterable[Row]) -> str:
    """Return the sha256 of every id and label, in order: equal exactly where training reads the same tokens."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row.input_ids).to_bytes(8, "little"))
        digest.update(array("i", row.input_ids).tobytes())
        digest.update(array("i", row.labels).tobytes())
    return digest.hexdigest()
