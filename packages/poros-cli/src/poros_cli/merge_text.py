"""What `poros merge` shows."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from poros.export import MergeReport
from poros.units import format_bytes

__all__ = ["MergeProgress", "show_merge"]


class MergeProgress:
    """A bar over the tensors on a terminal, nothing elsewhere. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("tensors", total=None)

    def __enter__(self) -> MergeProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, done: int, total: int) -> None:
        """Show how many tensors are merged; the probe comes after the last."""
        self._progress.update(self._task, completed=done, total=total)
        if done == total:
            self._progress.update(self._task, description="probe")


def show_merge(console: Console, report: MergeReport) -> None:
    """Print what was written and how it answers."""
    for note in report.notes:
        console.print(Text(f"Note: {note}", style="yellow"))
    files = "1 file" if len(report.files) == 1 else f"{len(report.files)} files"
    console.print(
        Text(
            f"Merged: {report.folder} ({report.model_class}, bfloat16, {format_bytes(report.num_bytes)} in {files}; "
            f"{report.merged_layers} linear layers changed)",
            style="bold green",
        )
    )
    if report.companions:
        console.print(Text(f"Copied from the base: {', '.join(report.companions)}"))
    for found in report.differences:
        console.print(
            Text(
                f"Largest logit difference to {found.reference}: {found.largest:.3g} (logits reach "
                f"{found.largest_logit:.3g}); same next token at {found.same_choice} of {found.positions} positions "
                "of the probe"
            )
        )
