"""What becomes of a row that is too long."""

from __future__ import annotations

from array import array

from poros_data.encode import Encoded
from poros_data.rows import IGNORED

__all__ = ["fit"]

Piece = tuple["array[int]", "array[int]"]


def fit(encoded: Encoded, *, policy: str, max_length: int, bos: int | None) -> list[Piece]:
    """Return the (ids, labels) that stand for a row of more than ``max_length`` tokens; none drops it.

    A row that begins with the beginning-of-text token keeps it in every piece: models degrade strongly without. The
    first token of a piece is never supervised.

    Args:
        encoded: the row.
        policy: one of `poros_data.TRUNCATIONS` but ``error``.
        max_length: T at most.
        bos: the tokenizer's beginning-of-text token.
    """
    ids, labels = encoded.input_ids, encoded.labels
    if policy == "truncate-right":
        return [(ids[:max_length], labels[:max_length])]
    head = ids[:1] if bos is not None and ids[0] == bos else array("i")
    room = max_length - len(head)
    if policy == "truncate-left":
        return [_behind(head, ids[-room:], labels[-room:])]
    if policy == "split" and encoded.plain:
        starts = range(len(head), len(ids), room)
        return [_behind(head, ids[start : start + room], labels[start : start + room]) for start in starts]
    return []


def _behind(head: array[int], ids: array[int], labels: array[int]) -> Piece:
    labels = array("i", [IGNORED]) * len(head) + labels
    labels[0] = IGNORED
    return head + ids, labels
