"""Between steps: the loss of held-out rows, and answers to sample prompts. Neither changes a bit of the training."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from poros.clock import Stopwatch
from poros.engine.engine import Engine
from poros.errors import ConfigError, NonFiniteError, UserError, explain
from poros.interfaces import MicroBatch
from poros.run.events import EvalEvent, SampleEvent
from poros.run.generation import stream_tokens
from poros.run.totals import group_for_evaluation

__all__ = ["SamplePrompt", "SamplePrompts", "answer_prompts", "evaluate_rows", "perplexity"]

Stopping = Callable[[], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplePrompt:
    """A prompt as the user wrote it, and as the model reads it."""

    text: str
    input_ids: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplePrompts:
    """What a run answers from time to time, taking the likeliest token each time.

    Attributes:
        prompts: in order.
        decode: turns the tokens of an answer into text.
        stop_ids: tokens that end an answer.
        max_new_tokens: of one answer at most.
    """

    prompts: Sequence[SamplePrompt]
    decode: Callable[[Sequence[int]], str]
    stop_ids: frozenset[int]
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(
                explain("Bad setting `sample_tokens`", expected="a positive integer", got=self.max_new_tokens)
            )


def evaluate_rows(
    engine: Engine,
    rows: Sequence[MicroBatch],
    *,
    step: int,
    max_positions: int,
    checkpoint: Path | None,
    stopping: Stopping,
) -> EvalEvent | None:
    """Return the loss over all supervised tokens of the rows; None if it was abandoned.

    Args:
        engine: with the adapter as its bank holds it.
        rows: held-out micro-batches.
        step: how many optimizer steps are done.
        max_positions: rows go through together as far as they take no more positions than this.
        checkpoint: newest one, to be named.
        stopping: asked between groups of rows; true abandons the evaluation.

    Raises:
        UserError: no token is supervised.
        NonFiniteError: the loss is NaN or infinite.
    """
    watch = Stopwatch()
    total, count = 0.0, 0
    for group in group_for_evaluation(rows, max_positions):
        if stopping():
            return None
        loss_sum, supervised = engine.evaluate(group)
        total, count = total + loss_sum, count + supervised
    engine.take_statistics()  # an evaluation's copies are not the next step's
    if count == 0:
        raise UserError(
            explain("Nothing to evaluate", expected="supervised tokens in the held-out rows", got="none")
        )
    loss = total / count
    if not math.isfinite(loss):
        raise NonFiniteError(
            explain(
                f"The held-out loss after step {step} is not finite",
                expected="a finite loss",
                got=loss,
                next_step="Look at the held-out rows; the newest checkpoint is "
                + f"{checkpoint or 'none yet'}",
            )
        )
    return EvalEvent(
        step=step,
        eval_loss=loss,
        eval_perplexity=perplexity(loss),
        eval_supervised_tokens=count,
        eval_seconds=watch.seconds,
    )


def perplexity(loss: float) -> float | None:
    """Return ``exp(loss)``; None where that is no number."""
    try:
        return math.exp(loss)
    except OverflowError:  # JSON has no infinity
        return None


def answer_prompts(
    engine: Engine, samples: SamplePrompts, *, step: int, stopping: Stopping
) -> list[SampleEvent] | None:
    """Return an answer to every prompt; None if that was abandoned.

    Args:
        engine: with the adapter as its bank holds it.
        samples: the prompts.
        step: how many optimizer steps are done.
        stopping: asked after every token; true abandons all answers.

    Raises:
        UserError: a prompt is empty or holds a token that the model does not have.
    """
    events = []
    for index, prompt in enumerate(samples.prompts):
        watch, tokens = Stopwatch(), []
        stream = stream_tokens(
            engine, prompt.input_ids, max_new_tokens=samples.max_new_tokens, stop_ids=samples.stop_ids
        )
        with contextlib.closing(stream):  # type: ignore[type-var]  # a generator, annotated as an iterator
            for token in stream:
                tokens.append(token)
                if stopping():
                    return None
        events.append(
            SampleEvent(
                step=step,
                index=index,
                prompt=prompt.text,
                text=samples.decode(tokens),
                tokens=len(tokens),
                ended=len(tokens) < samples.max_new_tokens,
                seconds=watch.seconds,
            )
        )
    return events
