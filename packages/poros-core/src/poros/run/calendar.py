"""What is due after a number of optimizer steps: a pure function of the settings and of what was done before."""

from __future__ import annotations

from dataclasses import dataclass

from poros.run.selection import Selection
from poros.run.settings import RunSettings

__all__ = ["Calendar"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Calendar:
    """Says what is due after ``done`` steps.

    Attributes:
        settings: of the run.
        num_steps: of the whole run.
        has_rows: there are held-out rows.
        has_prompts: there are sample prompts.
    """

    settings: RunSettings
    num_steps: int
    has_rows: bool
    has_prompts: bool

    def saves(self, done: int) -> bool:
        """A checkpoint is due."""
        return self._due(self.settings.save_every, done)

    def evaluates(self, done: int, selection: Selection) -> bool:
        """An evaluation is due and was not made."""
        due = self.has_rows and self._due(self.settings.eval_every, done)
        return due and selection.evaluated != done

    def answers(self, done: int, selection: Selection) -> bool:
        """Answers are due and were not given: before the first step too, where what will not work shows early."""
        due = done == 0 or self._due(self.settings.sample_every, done) or self.stops(selection)
        return self.has_prompts and due and selection.sampled != done

    def stops(self, selection: Selection) -> bool:
        """Patience is exhausted."""
        patience = self.settings.early_stop_patience
        return patience is not None and selection.stale >= patience

    def ends(self, done: int, selection: Selection) -> bool:
        """The run is over, and nothing was put off that belongs to its end."""
        over = done == self.num_steps or self.stops(selection)
        return over and not self.evaluates(done, selection) and not self.answers(done, selection)

    def _due(self, every: int | None, done: int) -> bool:
        return done == self.num_steps or (every is not None and done > 0 and done % every == 0)
