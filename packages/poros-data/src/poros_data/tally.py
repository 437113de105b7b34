"""Which rows are kept, and the account of the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from poros_data.encode import Encoded
from poros_data.errors import DataError, explain
from poros_data.report import NOTHING_LEFT, NOTHING_SUPERVISED, TOO_LONG, Count, DataReport, SourceReport
from poros_data.rows import Row
from poros_data.sources import DataFile
from poros_data.truncation import fit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Tally"]


@dataclass(slots=True)
class Tally:
    """Rows kept and the account of the others.

    Attributes:
        files: every file, in the order of reading.
        policy: one of `poros_data.TRUNCATIONS`.
        bos: the tokenizer's beginning-of-text token.
    """

    files: Sequence[DataFile]
    max_length: int
    policy: str
    bos: int | None
    rows: list[Row] = field(default_factory=list)
    dropped: dict[str, Count] = field(default_factory=dict)
    truncated: dict[str, Count] = field(default_factory=dict)
    lost_turns: dict[str, Count] = field(default_factory=dict)
    repaired: dict[str, Count] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    cut_tokens: int = 0
    first_cut: tuple[int, int] | None = None

    def add(self, file: int, line: int, encoded: Encoded) -> None:
        """Keep, cut or drop one row.

        Raises:
            DataError: it is unusable and the policy is ``error``.
        """
        length = len(encoded.input_ids)
        bin_ = 1 << max(0, length - 1).bit_length()
        self.lengths[bin_] = self.lengths.get(bin_, 0) + 1
        row = Row(encoded.input_ids, encoded.labels, line, file)
        if row.num_supervised == 0:
            self._drop(row, NOTHING_SUPERVISED, "no trained assistant turn, or no text in it")
            return
        kept = [row]
        if length > self.max_length:
            kept = self._cut(row, encoded)
        if not kept:
            return
        self.rows += kept
        if encoded.repaired:
            self._count(self.repaired, "repaired", row)
        for role in encoded.lost_roles:
            self._count(self.lost_turns, role, row)

    def _cut(self, row: Row, encoded: Encoded) -> list[Row]:
        pieces = []
        if self.policy != "error":
            pieces = fit(encoded, policy=self.policy, max_length=self.max_length, bos=self.bos)
        if not pieces:
            reason = f"{TOO_LONG} {self.max_length}"
            self._drop(row, reason, f"{len(row.input_ids)} tokens")
            return []
        kept = [Row(ids, labels, row.line, row.file) for ids, labels in pieces]
        kept = [piece for piece in kept if piece.num_supervised]
        if not kept:
            self._drop(row, NOTHING_LEFT, "none")
            return []
        self._count(self.truncated, self.policy, row)
        self.first_cut = self.first_cut or (row.file, row.line)
        self.cut_tokens += max(0, len(row.input_ids) - sum(len(piece.input_ids) for piece in kept))
        return kept

    def _drop(self, row: Row, reason: str, got: str) -> None:
        if self.policy == "error":
            raise DataError(
                explain(
                    "Unusable row",
                    expected=f"1 to {self.max_length} tokens, at least one supervised",
                    got=got,
                    where=self.files[row.file].where(row.line),
                    next_step="Shorten or remove it, raise `max_length`, or set `rows.truncation`",
                )
            )
        self._count(self.dropped, reason, row)

    def _count(self, counts: dict[str, Count], key: str, row: Row) -> None:
        if known := counts.get(key):
            counts[key] = Count(count=known.count + 1, first_line=known.first_line, first=known.first)
            return
        file = self.files[row.file]
        first = f"{file.unit} {row.line}" if len(self.files) == 1 else file.where(row.line)
        counts[key] = Count(count=1, first_line=row.line, first=first)

    def report(
        self,
        tokenizer: PreTrainedTokenizerBase,
        sources: tuple[SourceReport, ...],
        stop_token_ids: Iterable[int],
        notes: tuple[str, ...],
    ) -> DataReport:
        """Return the summary.

        Raises:
            DataError: no row is left.
        """
        if not self.rows:
            raise DataError(
                explain(
                    "Nothing to train on",
                    expected="at least one supervised token",
                    got="; ".join(f"{c.count} rows dropped: {reason}" for reason, c in self.dropped.items()),
                    where=", ".join(source.name for source in sources),
                    next_step="Raise `max_length`, set `rows.truncation`, or give rows an assistant turn with text",
                )
            )
        schemas: dict[str, int] = {}
        for source in sources:
            for name, count in source.schemas.items():
                schemas[name] = schemas.get(name, 0) + count
        last = next(label for label in reversed(self.rows[0].labels) if label >= 0)
        return DataReport(
            sources=sources,
            num_rows=len(self.rows),
            schemas=schemas,
            dropped=self.dropped,
            truncated=self.truncated,
            cut_tokens=self.cut_tokens,
            repaired=self.repaired.get("repaired"),
            lost_turns=self.lost_turns,
            supervised_tokens=sum(row.num_supervised for row in self.rows),
            total_tokens=sum(len(row.input_ids) for row in self.rows),
            longest_tokens=max(len(row.input_ids) for row in self.rows),
            lengths=dict(sorted(self.lengths.items())),
            last_supervised_token=str(tokenizer.convert_ids_to_tokens(last)),
            last_supervised_id=None if self._end_is_cut() else last,
            warnings=tuple(self._warnings(tokenizer, last, set(stop_token_ids))),
            notes=notes,
        )

    def _end_is_cut(self) -> bool:
        """Say whether the first row kept ends where it was cut."""
        first, row = self.first_cut, self.rows[0]
        return self.policy in ("truncate-right", "split") and first == (row.file, row.line)

    def _warnings(self, tokenizer: PreTrainedTokenizerBase, last: int, stops: set[int]) -> Iterable[str]:
        for role, count in self.lost_turns.items():
            yield f"{count.count} {role} turns lost text in the chat template (first: {count.first})"
        if self._end_is_cut():
            return
        if last != tokenizer.eos_token_id and last not in stops:
            yield (
                f"row 0 ({self.files[self.rows[0].file].unit} {self.rows[0].line}) ends with the supervised token "
                f"`{tokenizer.convert_ids_to_tokens(last)}`, which does not stop generation (the tokenizer's "
                f"eos_token is `{tokenizer.eos_token}`): the model may never stop"
            )
