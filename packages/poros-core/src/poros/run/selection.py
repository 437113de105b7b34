"""What evaluations decide: which one was the best, and when to stop early. Part of every checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poros.checkpoint import atomic_write_json, checkpoint_folder
from poros.checkpoint.manifest import check_manifest
from poros.errors import CheckpointError, ConfigError, explain
from poros.interfaces import MicroBatch
from poros.run.settings import RunSettings

__all__ = ["BEST_FILE", "Selection", "continued_selection", "write_best"]

# In the output folder: which checkpoint the best evaluation's is.
BEST_FILE = "best.json"


@dataclass(slots=True)
class Selection:
    """The evaluations so far.

    Attributes:
        rows: digest of the held-out rows.
        evaluated: after how many steps the last evaluation was made; None before the first.
        sampled: likewise for samples.
        last_loss: of the last evaluation.
        best_step, best_loss: of the evaluation with the lowest loss; of equal ones, the first.
        reference_loss: the last loss that was lower than the reference before it by more than the minimal delta.
        stale: evaluations since then.
    """

    rows: str
    evaluated: int | None = None
    sampled: int | None = None
    last_loss: float | None = None
    best_step: int | None = None
    best_loss: float | None = None
    reference_loss: float | None = None
    stale: int = 0

    def add(self, step: int, loss: float, min_delta: float) -> bool:
        """Take in an evaluation; return whether it is the best so far."""
        self.evaluated, self.last_loss = step, loss
        if self.reference_loss is None or loss < self.reference_loss - min_delta:
            self.reference_loss, self.stale = loss, 0
        else:
            self.stale += 1
        if self.best_loss is not None and loss >= self.best_loss:
            return False
        self.best_step, self.best_loss = step, loss
        return True

    def record(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return dataclasses.asdict(self)

    def restore(self, recorded: Mapping[str, Any]) -> tuple[str, ...]:
        """Go on from a checkpoint's `record`.

        Returns:
            A note where the held-out rows are others: what was best among the old ones says nothing about these.
        """
        names = {field.name for field in dataclasses.fields(self)}
        known = {name: value for name, value in recorded.items() if name in names}
        if known.pop("rows", None) != self.rows:
            self.sampled = known.get("sampled")
            if known.get("best_step") is None:
                return ()
            return ("The held-out rows changed: best evaluation and early stop begin anew.",)
        for name, value in known.items():
            setattr(self, name, value)
        return ()


def continued_selection(
    rows: Sequence[MicroBatch], settings: RunSettings, output: Path, meta: Mapping[str, Any] | None
) -> tuple[Selection, tuple[str, ...]]:
    """Return the selection of a run, and sentences about what of the checkpoint's cannot be continued.

    Args:
        rows: held-out micro-batches.
        settings: of the run.
        output: its folder.
        meta: of the checkpoint to go on from, or None.

    Raises:
        ConfigError: the settings choose among evaluations, and there are no held-out rows.
    """
    if not rows and (settings.keep_best or settings.early_stop_patience is not None):
        name = "keep_best" if settings.keep_best else "early_stop_patience"
        raise ConfigError(
            explain(
                f"Bad setting `{name}`",
                expected="held-out rows, among whose evaluations it chooses",
                got="none",
            )
        )
    selection = Selection(rows=_digest(rows))
    notes = selection.restore((meta or {}).get("selection", {}))
    if settings.keep_best and selection.best_step is not None:
        folder = checkpoint_folder(output, selection.best_step)
        try:
            check_manifest(folder)
        except CheckpointError as error:
            notes += (f"The best evaluation so far has no checkpoint, so best begins anew: {error}",)
            selection.best_step = selection.best_loss = None
    return selection, notes


def write_best(output: Path, selection: Selection | None) -> None:
    """Let `BEST_FILE` name the best evaluation and its checkpoint; remove it where there is none."""
    if selection is None or selection.best_step is None:
        (output / BEST_FILE).unlink(missing_ok=True)
        return
    folder = checkpoint_folder(output, selection.best_step)
    best = {"step": selection.best_step, "eval_loss": selection.best_loss}
    atomic_write_json(output / BEST_FILE, {**best, "checkpoint": folder.relative_to(output).as_posix()})


def _digest(micro_batches: Sequence[MicroBatch]) -> str:
    """Return a digest of every id and label: losses over other rows cannot be compared."""
    digest = hashlib.sha256()
    for batch in micro_batches:
        for tensor in (batch.input_ids, batch.labels):
            digest.update(str(tuple(tensor.shape)).encode())
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
