"""Greedy answers through the engine's own forward pass, to see what an adapter does. Not a way to serve a model.

Shape letters: T tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from poros.engine.engine import Engine
from poros.engine.targets import IGNORE_INDEX

__all__ = ["generate"]


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One row without labels."""

    input_ids: torch.Tensor
    labels: torch.Tensor


@torch.no_grad()
def generate(
    engine: Engine, prompt: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int]
) -> list[int]:
    """Return the greedily chosen tokens after ``prompt``, without the one that stopped it.

    The whole row runs again for every token: nothing is cached between blocks that come and go. Rows are padded to the
    run's length buckets, so that few shapes occur; no real token attends to padding.

    Args:
        engine: a loaded engine, with the adapter as its bank holds it.
        prompt: token ids.
        max_new_tokens: at most so many.
        stop_ids: tokens that end the answer.
    """
    tokens = list(prompt)
    bucket = engine.model.numerics.length_bucket
    for _ in range(max_new_tokens):
        width = -(-len(tokens) // bucket) * bucket
        ids = torch.zeros(1, width, dtype=torch.int64)
        ids[0, : len(tokens)] = torch.tensor(tokens)
        engine.evaluate([_Prompt(ids, torch.full_like(ids, IGNORE_INDEX))])
        last = engine.last_hidden(0)[0, len(tokens) - 1 : len(tokens)]
        chosen = int(engine.model.head.logits(last).argmax())
        if chosen in stop_ids:
            break
        tokens.append(chosen)
    engine.take_statistics()  # what was moved for an answer is not a training step's
    return tokens[len(prompt) :]
