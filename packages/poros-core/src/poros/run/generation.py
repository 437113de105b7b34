"""Answers through the engine, token by token, to see what an adapter does. Not a way to serve a model.

Shape letters: T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from poros.engine.cached_row import CachedRow, supports_cache
from poros.engine.engine import Engine
from poros.engine.targets import IGNORE_INDEX
from poros.errors import ConfigError, UserError, explain

__all__ = ["Sampling", "generate", "stream_tokens"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is drawn from the logits.

    Attributes:
        temperature: the logits are divided by it; 0 takes the likeliest token.
        top_p: only the likeliest tokens whose probabilities add up to this take part.
        seed: of the draws, which are made on the CPU.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(
                explain("Bad setting `temperature`", expected="zero or more", got=self.temperature)
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(
                explain("Bad setting `top_p`", expected="a probability in (0, 1]", got=self.top_p)
            )


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One row without labels."""

    input_ids: torch.Tensor
    labels: torch.Tensor


def generate(
    engine: Engine, prompt: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int]
) -> list[int]:
    """Return the greedily chosen tokens after ``prompt``, without the one that stopped it; see `stream_tokens`."""
    return list(stream_tokens(engine, prompt, max_new_tokens=max_new_tokens, stop_ids=stop_ids))


def stream_tokens(
    engine: Engine,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    sampling: Sampling | None = None,
) -> Iterator[int]:
    """Yield the tokens after ``prompt`` as they are chosen, without the one that stops them.

    Every token visits every block once. Where the architecture allows it, a cache holds what earlier positions left;
    elsewhere the whole row runs again, padded to the run's length buckets so that few shapes occur (no real token
    attends to padding).

    Args:
        engine: a loaded engine, with the adapter as its bank holds it.
        prompt: token ids.
        max_new_tokens: at most so many.
        stop_ids: tokens that end the answer.
        sampling: how a token is drawn; None takes the likeliest.

    Raises:
        UserError: the prompt is empty or holds a token that the model does not have.
    """
    if not prompt:
        raise UserError(explain("Nothing to continue", expected="at least one token", got="an empty prompt"))
    choose = _chooser(sampling or Sampling())
    logits_of = _cached(engine) if supports_cache(engine) else _uncached(engine)
    new, count = list(prompt), 0
    try:
        while count < max_new_tokens:
            chosen = choose(logits_of(new))
            if chosen in stop_ids:
                break
            yield chosen
            new, count = [chosen], count + 1
    finally:
        engine.take_statistics()  # what was moved for an answer is not a training step's


def _cached(engine: Engine) -> Callable[[Sequence[int]], torch.Tensor]:
    return CachedRow(engine).append


def _uncached(engine: Engine) -> Callable[[Sequence[int]], torch.Tensor]:
    tokens: list[int] = []
    bucket = engine.model.numerics.length_bucket

    @torch.no_grad()
    def logits_of(new: Sequence[int]) -> torch.Tensor:
        tokens.extend(new)
        width = -(-len(tokens) // bucket) * bucket
        ids = torch.zeros(1, width, dtype=torch.int64)
        ids[0, : len(tokens)] = torch.tensor(tokens)
        engine.evaluate([_Prompt(ids, torch.full_like(ids, IGNORE_INDEX))])
        return engine.model.head.logits(engine.last_hidden(0)[0, len(tokens) - 1 : len(tokens)])

    return logits_of


def _chooser(sampling: Sampling) -> Callable[[torch.Tensor], int]:
    """Return what picks a token from (1, V) logits."""
    if sampling.temperature == 0:
        return lambda logits: int(logits.argmax())
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    generator = torch.Generator().manual_seed(sampling.seed)

    def draw(logits: torch.Tensor) -> int:
        scores = warpers(torch.empty(1, 0, dtype=torch.int64), logits.float().cpu())
        return int(torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=generator))

    return draw
