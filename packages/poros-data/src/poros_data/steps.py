"""The micro-batches of every optimizer step, as a pure function of the step's index."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from poros_data.batching import Batch, make_batches
from poros_data.errors import DataError, explain
from poros_data.packing import pack
from poros_data.rows import Row, digest_rows
from poros_data.settings import ORDERS

__all__ = ["StepPlan"]

# `length-sorted` sorts within this many micro-batches: long enough to save nearly all padding, short enough that the
# neighbours of a row differ from epoch to epoch.
MICRO_BATCHES_PER_SORT = 64

Unit = tuple[int, ...]


class StepPlan:
    """A `poros.interfaces.StepSource` over tokenized rows.

    Each epoch visits every row as often as its weight says (once without weights), in an order that follows from
    (seed, epoch). It is cut into micro-batches of ``micro_batch_size`` rows and steps of
    ``micro_batches_per_step`` micro-batches; the last micro-batch and the last step of an epoch keep what is
    left. No step holds rows of two epochs.

    Attributes:
        num_steps: optimizer steps of the run.
        steps_per_epoch: optimizer steps of the first epoch; with packing others may have a few more or fewer.
        fingerprint: sha256 of the rows' tokens and of every setting that decides what a step reads. The
            length of the run is left out: a longer run reads the same steps first.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        micro_batch_size: int,
        micro_batches_per_step: int,
        length_bucket: int,
        pad_id: int,
        seed: int,
        num_epochs: int | None = None,
        max_steps: int | None = None,
        order: str = "shuffled",
        weights: Sequence[float] | None = None,
        packed_length: int | None = None,
    ) -> None:
        """Plan the steps.

        Args:
            rows: tokenized rows.
            micro_batch_size: B of a full micro-batch.
            micro_batches_per_step: gradient accumulation.
            length_bucket: T is rounded up to a multiple of this.
            pad_id: id of padded positions (see `padding_id`).
            seed: decides the order together with the epoch.
            num_epochs, max_steps: the length of the run; with both, the shorter; ``max_steps`` alone repeats
                the rows as often as it needs.
            order: one of `poros_data.ORDERS`.
            weights: per row, how often it comes in an epoch: 2.5 is twice, and once more for a random half of the rows
                of that weight, another half in every epoch. None is once each.
            packed_length: put rows behind each other in one row of a batch while they fit into so many tokens; None
                packs nothing.

        Raises:
            DataError: no rows, a number below 1, or neither ``num_epochs`` nor ``max_steps``.
        """
        numbers = {
            "micro_batch_size": micro_batch_size,
            "micro_batches_per_step": micro_batches_per_step,
            "length_bucket": length_bucket,
            "num_epochs": num_epochs,
            "max_steps": max_steps,
            "packed_length": packed_length,
        }
        for name, number in numbers.items():
            if number is not None and number < 1:
                raise DataError(explain(f"Bad setting `{name}`", expected="1 or more", got=number))
        if order not in ORDERS:
            raise DataError(explain("Bad setting `order`", expected=" | ".join(ORDERS), got=repr(order)))
        if not rows:
            raise DataError(explain("Cannot plan steps", expected="at least one row", got="none"))
        if num_epochs is None and max_steps is None:
            raise DataError(
                explain("Cannot plan steps", expected="`num_epochs` or `max_steps`", got="neither of them")
            )
        self._rows = rows
        self._micro_batch_size = micro_batch_size
        self._units_per_step = micro_batch_size * micro_batches_per_step
        self._length_bucket = length_bucket
        self._pad_id = pad_id
        self._seed = seed
        self._order = order
        self._weights = weights
        self._packed_length = packed_length
        self._cached: tuple[int, list[Unit]] | None = None
        self._ends: list[int] = []  # per epoch known so far, the number of steps up to its end
        if not self._units(0):
            raise DataError(
                explain("Cannot plan steps", expected="a row in every epoch", got="weights too small for one")
            )
        self.steps_per_epoch = self._end_of(0)
        self.num_steps = self._length(num_epochs, max_steps)
        self.fingerprint = self._fingerprint(micro_batches_per_step)

    def step(self, index: int) -> list[Batch]:
        """Return the micro-batches of optimizer step ``index`` (0-based). Raises `IndexError` outside the run."""
        if not 0 <= index < self.num_steps:
            raise IndexError(f"step {index} of {self.num_steps}")
        epoch = 0
        if self._packed_length is None:  # every epoch is as long as the first
            epoch = index // self.steps_per_epoch
            start = epoch * self.steps_per_epoch
        else:
            while self._end_of(epoch) <= index:
                epoch += 1
            start = self._end_of(epoch - 1) if epoch else 0
        place = (index - start) * self._units_per_step
        return make_batches(
            self._rows,
            self._units(epoch)[place : place + self._units_per_step],
            micro_batch_size=self._micro_batch_size,
            length_bucket=self._length_bucket,
            pad_id=self._pad_id,
            packed=self._packed_length is not None,
        )

    def _length(self, num_epochs: int | None, max_steps: int | None) -> int:
        lengths = [] if max_steps is None else [max_steps]
        if num_epochs is not None:
            packed = self._packed_length is not None
            lengths.append(self._end_of(num_epochs - 1) if packed else num_epochs * self.steps_per_epoch)
        return min(lengths)

    def _end_of(self, epoch: int) -> int:
        while len(self._ends) <= epoch:
            steps = -(-len(self._units(len(self._ends))) // self._units_per_step)
            self._ends.append(steps + (self._ends[-1] if self._ends else 0))
        return self._ends[epoch]

    def _units(self, epoch: int) -> list[Unit]:
        """Return what stands in the rows of the epoch's micro-batches, in order."""
        if self._cached is None or self._cached[0] != epoch:
            order = self._ordered(epoch)
            units: list[Unit] = [(row,) for row in order]
            if self._packed_length is not None:
                lengths = [len(self._rows[row].input_ids) for row in order]
                packs = pack(lengths, self._packed_length)
                units = [tuple(order[place] for place in places) for places in packs]
            self._cached = epoch, units
        return self._cached[1]

    def _ordered(self, epoch: int) -> list[int]:
        visits = self._visits(epoch)
        if self._order != "file":
            visits.sort(key=lambda visit: self._key(epoch, *visit))
        order = [row for row, _ in visits]
        return self._sorted_by_length(epoch, order) if self._order == "length-sorted" else order

    def _visits(self, epoch: int) -> list[tuple[int, int]]:
        """Return (row, how many visits before this one) of an epoch, in the order of the file."""
        if self._weights is None:
            return [(row, 0) for row in range(len(self._rows))]
        extra: set[int] = set()
        by_fraction: dict[float, list[int]] = {}
        for row, weight in enumerate(self._weights):
            by_fraction.setdefault(weight % 1, []).append(row)
        for fraction, rows in by_fraction.items():
            drawn = sorted(rows, key=lambda row: self._key(epoch, row, "weight"))
            extra.update(drawn[: round(fraction * len(rows))])
        return [
            (row, visit)
            for row, weight in enumerate(self._weights)
            for visit in range(int(weight) + (row in extra))
        ]

    def _sorted_by_length(self, epoch: int, order: list[int]) -> list[int]:
        """Sort within stretches of the shuffled order, then shuffle the full micro-batches that come of it."""
        size = self._micro_batch_size
        stretch = MICRO_BATCHES_PER_SORT * size
        batches: list[list[int]] = []
        for start in range(0, len(order), stretch):
            part = sorted(order[start : start + stretch], key=lambda row: len(self._rows[row].input_ids))
            batches += [part[place : place + size] for place in range(0, len(part), size)]
        last = [batches.pop()] if len(batches[-1]) < size else []  # a step is a fixed number of full ones
        batches = [
            batch
            for _, batch in sorted(enumerate(batches), key=lambda item: self._key(epoch, item[0], "batch"))
        ]
        return [row for batch in (*batches, *last) for row in batch]

    def _key(self, epoch: int, row: int, more: int | str = 0) -> bytes:
        """A hash to sort by: the same order on every platform and library version, which generators do not promise."""
        text = f"{self._seed}:{epoch}:{row}" + (f":{more}" if more else "")
        return hashlib.sha256(text.encode()).digest()

    def _fingerprint(self, micro_batches_per_step: int) -> str:
        drawn = self._order != "file" or self._weights is not None
        settings: dict[str, object] = {
            "rows": digest_rows(self._rows),
            "micro_batch_size": self._micro_batch_size,
            "micro_batches_per_step": micro_batches_per_step,
            "length_bucket": self._length_bucket,
            "pad_id": self._pad_id,
            "seed": self._seed if drawn else None,
        }
        if self._order == "length-sorted":
            settings["order"] = self._order
        if self._weights is not None:
            settings["weights"] = list(self._weights)
        if self._packed_length is not None:
            settings["packed_length"] = self._packed_length
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
