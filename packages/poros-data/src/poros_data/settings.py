"""How rows are made from a data set: what a run's config calls ``rows``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from poros_data.errors import DataError, explain

__all__ = ["ORDERS", "TRUNCATIONS", "RowSettings", "read_template"]

TRUNCATIONS = ("drop", "truncate-left", "truncate-right", "split", "error")
ORDERS = ("shuffled", "length-sorted", "file")


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSettings:
    """What is done with rows between the file and the first step.

    Attributes:
        truncation: of a row with more than ``max_length`` tokens: ``drop`` it; keep its end (``truncate-left``) or
            its beginning (``truncate-right``); ``split`` plain text into pieces and drop other rows; or stop with an
            ``error``. A row without any supervised token (left) is dropped under all of them but ``error``.
        repair: where the chat template refuses a conversation, merge neighbouring turns of one role, then fold the
            system turn into the first user turn. Such rows are counted.
        template: file with a Jinja chat template to use instead of the tokenizer's own.
        order: ``shuffled`` anew in every epoch; ``length-sorted``: shuffled, then rows of similar length share
            micro-batches, which saves padding; ``file``: as they stand in the data.
        packing: put rows behind each other in one row of a micro-batch while they fit into ``max_length``, each with
            positions of its own, so that none sees another. Refused for models whose blocks cannot keep them apart.
    """

    truncation: str = "drop"
    repair: bool = False
    template: str | None = None
    order: str = "shuffled"
    packing: bool = False

    def __post_init__(self) -> None:
        for name, known in (("truncation", TRUNCATIONS), ("order", ORDERS)):
            value = getattr(self, name)
            if value not in known:
                raise DataError(explain(f"Bad setting `{name}`", expected=" | ".join(known), got=repr(value)))


def read_template(path: str | None) -> str | None:
    """Return the text of a template file; None for None.

    Raises:
        DataError: the file cannot be read or is empty. What is wrong inside it shows when it renders.
    """
    if path is None:
        return None
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            explain(
                "Cannot read the chat template",
                expected="a Jinja file in UTF-8",
                got=error,
                next_step="Correct `rows.template`",
            )
        ) from error
    if not text.strip():
        raise DataError(
            explain("Cannot read the chat template", expected="text", got="an empty file", where=path)
        )
    return text
