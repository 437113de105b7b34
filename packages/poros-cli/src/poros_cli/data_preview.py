"""What `poros data preview` shows: rows as the model will see them, and the account of the data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from poros_data import IGNORED, Dataset, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["show_preview"]

SUPERVISED_STYLE = "bold green"
# Around supervised text where there is no colour.
OPEN, CLOSE = "[[", "]]"
# Of a longer stretch, the beginning and the end are shown.
STRETCH_CHARACTERS = 800
BAR_CHARACTERS = 40


def show_preview(
    console: Console,
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_rows: int,
    max_length: int,
    warnings: Sequence[str],
) -> None:
    """Print the summary, the lengths and the first rows.

    Args:
        console: colour is used where it has any; markers otherwise.
        dataset: what was read.
        tokenizer: that it was read with.
        num_rows: rows to show.
        max_length: tokens per row at most.
        warnings: further sentences that the user should see.
    """
    for line in dataset.report.lines():
        warned = line.startswith("warning: ")
        console.print(Text(line, style="yellow" if warned else ""))
    for warning in warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
    console.print()
    for line in histogram_lines(dataset.report.lengths, max_length):
        console.print(Text(line))
    coloured = console.color_system is not None
    legend = "is green" if coloured else f"stands between {OPEN} and {CLOSE}"
    console.print()
    console.print(Text(f"Supervised text {legend}; everything else is context.", style="bold"))
    for index, row in enumerate(dataset.rows[:num_rows]):
        console.print()
        console.print(
            Text(
                f"row {index} ({dataset.where(row)}): {len(row.input_ids)} tokens, {row.num_supervised} supervised",
                style="bold",
            )
        )
        console.print(row_text(tokenizer, row, coloured=coloured))
    console.print()
    report = dataset.report
    if report.last_supervised_id is None:
        console.print(Text("The last supervised token of row 0 is where truncation cut it."))
    else:
        warned = any("does not stop" in warning for warning in (*report.warnings, *warnings))
        stops = ", where generation does not stop: see above" if warned else ", a stop token"
        console.print(
            Text(
                f"The last supervised token of row 0 is {report.last_supervised_token!r} "
                f"({report.last_supervised_id}){stops}."
            )
        )


def row_text(tokenizer: PreTrainedTokenizerBase, row: Row, *, coloured: bool) -> Text:
    """Return a row's text with its supervised stretches in green, or between markers."""
    text = Text()
    for supervised, ids in _stretches(row):
        said = _shortened(str(tokenizer.decode(ids)))
        if supervised and not coloured:
            said = f"{OPEN}{said}{CLOSE}"
        text.append(said, style=SUPERVISED_STYLE if supervised else "")
    return text


def histogram_lines(lengths: dict[int, int] | object, max_length: int) -> Iterator[str]:
    """Yield a bar chart of row lengths, one line per power of two."""
    assert isinstance(lengths, dict)
    most = max(lengths.values())
    yield f"tokens per row (max_length is {max_length}):"
    for longest, count in lengths.items():
        shortest = longest // 2 + 1
        bar = "#" * max(1, round(BAR_CHARACTERS * count / most))
        beyond = "  longer than max_length" if shortest > max_length else ""
        yield f"{shortest:>8} .. {longest:<8} {bar:<{BAR_CHARACTERS}} {count}{beyond}"


def _stretches(row: Row) -> Iterator[tuple[bool, list[int]]]:
    start = 0
    for end in range(1, len(row.input_ids) + 1):
        supervised = row.labels[start] != IGNORED
        if end == len(row.input_ids) or (row.labels[end] != IGNORED) != supervised:
            yield supervised, list(row.input_ids[start:end])
            start = end


def _shortened(text: str) -> str:
    half = STRETCH_CHARACTERS // 2
    left_out = len(text) - 2 * half
    return text if left_out <= 0 else f"{text[:half]} ...({left_out} characters)... {text[-half:]}"
