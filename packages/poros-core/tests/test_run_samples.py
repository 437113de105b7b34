"""Answers between steps: greedy, recorded, and without a trace in the training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import poros
from poros.checkpoint import checkpoint_folder, load_run_state
from poros.errors import UserError
from poros.run import SampleEvent, SamplePrompt, SamplePrompts, StepEvent
from poros.run.generation import generate

Make = Callable[..., poros.Trainer]
PROMPTS = SamplePrompts(
    prompts=(SamplePrompt(text="one", input_ids=(3, 4, 5)), SamplePrompt(text="two", input_ids=(7,))),
    decode=lambda ids: " ".join(map(str, ids)),
    stop_ids=frozenset(),
    max_new_tokens=4,
)


@pytest.fixture
def train(make_trainer: Make, make_steps: Any) -> Callable[..., poros.RunResult]:
    """Train four steps and answer after every second."""

    def trained(output: Path, *reporters: poros.Reporter, **settings: Any) -> poros.RunResult:
        steps = make_steps(num_rows=8, accumulation=2, epochs=1)
        usual = {"samples": PROMPTS, "sample_every": 2}
        with make_trainer(output, steps=steps, reporters=reporters, **{**usual, **settings}) as trainer:
            for reporter in reporters:
                reporter.trainer = trainer  # type: ignore[attr-defined]
            return trainer.run()

    return trained


def answers(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]


def test_answers_change_no_bit_of_weights_moments_or_generator(
    train: Callable[..., poros.RunResult], tmp_path: Path
) -> None:
    for name, settings in (("plain", {"samples": None}), ("answered", {})):
        torch.manual_seed(3)
        train(tmp_path / name, **settings)
    first, second = (
        load_run_state(checkpoint_folder(tmp_path / n, 4)).tensors for n in ("plain", "answered")
    )
    assert set(first) == set(second)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not (tmp_path / "plain" / "samples.jsonl").exists()


def test_answers_are_those_of_the_engine_before_the_first_step_between_and_at_the_end(
    make_trainer: Make, make_steps: Any, tmp_path: Path
) -> None:
    steps = make_steps(num_rows=6, accumulation=2, epochs=1)
    with make_trainer(tmp_path, steps=steps, samples=PROMPTS, sample_every=2) as trainer:
        trainer.run()
        ids = generate(trainer.engine, (3, 4, 5), max_new_tokens=4, stop_ids=())
    found = answers(tmp_path)
    assert [(a["step"], a["index"], a["prompt"]) for a in found] == [
        (step, index, text) for step in (0, 2, 3) for index, text in enumerate(("one", "two"))
    ]
    assert found[-2]["text"] == " ".join(map(str, ids))
    assert (found[-2]["tokens"], found[-2]["ended"]) == (4, False)


def test_a_signal_while_answering_saves_first_and_the_resumed_run_answers(
    train: Callable[..., poros.RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from poros.run import evaluating

    class Stop(poros.Reporter):
        trainer: poros.Trainer

        def on_step(self, event: StepEvent) -> None:
            stream = evaluating.stream_tokens

            def stopping(*args: Any, **kwargs: Any) -> Any:
                for token in stream(*args, **kwargs):
                    self.trainer.request_stop()
                    yield token

            if event.step == 2:
                monkeypatch.setattr(evaluating, "stream_tokens", stopping)

    train(tmp_path / "whole")
    result = train(tmp_path / "parts", Stop())
    assert (result.interrupted, result.steps) == (True, 2)
    assert [a["step"] for a in answers(tmp_path / "parts")] == [0, 0]
    monkeypatch.undo()
    assert not train(tmp_path / "parts", resume=True).interrupted
    states = [load_run_state(checkpoint_folder(tmp_path / name, 4)).tensors for name in ("whole", "parts")]
    assert all(torch.equal(states[0][n], states[1][n]) for n in states[0] if not n.startswith("generator"))
    told = [
        [(a["step"], a["index"], a["text"]) for a in answers(tmp_path / name)] for name in ("whole", "parts")
    ]
    assert told[0] == told[1]


def test_a_signal_before_the_first_step_leaves_a_checkpoint_to_resume_from(
    train: Callable[..., poros.RunResult], tmp_path: Path
) -> None:
    class Stop(poros.Reporter):
        trainer: poros.Trainer

        def on_start(self, event: Any) -> None:
            self.trainer.request_stop()

    result = train(tmp_path, Stop())
    assert (result.interrupted, result.steps) == (True, 0)
    assert result.checkpoint == checkpoint_folder(tmp_path, 0)
    assert train(tmp_path, resume=True).steps == 4
    assert [a["step"] for a in answers(tmp_path)] == [0, 0, 2, 2, 4, 4]


def test_a_prompt_with_a_token_that_the_model_does_not_have_fails_before_the_first_step(
    train: Callable[..., poros.RunResult], tmp_path: Path
) -> None:
    bad = SamplePrompts(
        prompts=(SamplePrompt(text="x", input_ids=(10**6,)),), decode=str, stop_ids=frozenset()
    )
    with pytest.raises(UserError):
        train(tmp_path, samples=bad)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_reporters_are_told_of_every_answer(train: Callable[..., poros.RunResult], tmp_path: Path) -> None:
    told: list[SampleEvent] = []

    class Listener(poros.Reporter):
        def on_sample(self, event: SampleEvent) -> None:
            told.append(event)

    train(tmp_path, Listener(), sample_every=None)
    assert [event.step for event in told] == [0, 0, 4, 4]
