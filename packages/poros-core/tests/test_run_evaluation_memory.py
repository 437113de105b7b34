"""An evaluation needs no more memory than the training around it: a large vocabulary, held-out rows of full length.

In a streamed run blocks are small, so that logits of every position, (B, T, V) in float32, would be the largest tensor
by far. Shape letters: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import poros
from poros.engine.engine import Engine
from poros.planning.request import PlanRequest
from poros.planning.working_set import _LiveBytes
from poros.run import SamplePrompts
from poros.run.evaluating import SamplePrompt
from poros.settings import ACCUMULATION_ORDERS, PLACES

# Four vocabulary chunks.
V = 65_536
T = 48
NUM_STEPS = 2
Make = Callable[..., poros.Trainer]


@dataclass
class Rows:
    """A micro-batch."""

    input_ids: torch.Tensor
    labels: torch.Tensor


def rows_of(seed: int, tokens: int = T, batch: int = 1) -> Rows:
    ids = torch.randint(1, V, (batch, tokens), generator=torch.Generator().manual_seed(seed))
    return Rows(ids, ids.clone())


class Steps:
    """Two micro-batches a step, rows of full length."""

    num_steps = NUM_STEPS
    fingerprint = "rows of full length"

    def step(self, index: int) -> list[Rows]:
        return [rows_of(2 * index), rows_of(2 * index + 1)]


class Peaks(poros.Reporter):
    """Remembers the bytes that were alive at most up to each event."""

    def __init__(self, live: _LiveBytes) -> None:
        self._live = live
        self.steps: list[int] = []
        self.evaluations: list[int] = []
        self.answers: list[int] = []

    def on_step(self, event: object) -> None:
        self.steps.append(self._live.peak)

    def on_eval(self, event: object) -> None:
        self.evaluations.append(self._live.peak)

    def on_sample(self, event: object) -> None:
        self.answers.append(self._live.peak)


class Largest(TorchDispatchMode):
    """Remembers the elements of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        found = [value.numel() for value in tree_iter(output) if isinstance(value, torch.Tensor)]
        self.elements = max(self.elements, *found, 0)
        return output


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny blocks under a large vocabulary."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("model") / "wide"
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def train(make_trainer: Make, wide_model: Path, tmp_path: Path) -> Callable[..., Any]:
    """Train inside a mode that watches tensors; keyword arguments are those of `make_trainer`."""

    def run(*reporters: poros.Reporter, watch: TorchDispatchMode, **arguments: Any) -> None:
        trainer = make_trainer(
            tmp_path / "out", steps=Steps(), model=wide_model, reporters=reporters, **arguments
        )
        with trainer:
            trainer.load()
            with watch:
                trainer.run()

    return run


@pytest.mark.parametrize(("order", "head"), list(zip(ACCUMULATION_ORDERS, PLACES, strict=True)))
def test_evaluations_raise_no_peak_of_training(train: Callable[..., Any], order: str, head: str) -> None:
    live = _LiveBytes()
    peaks = Peaks(live)
    held_out = tuple(rows_of(100 + index) for index in range(5))
    plan = PlanRequest(residency="streamed", num_slots=2, order=order, head=head)
    train(peaks, watch=live, evaluation=held_out, eval_every=1, plan=plan)
    assert len(peaks.steps) == len(peaks.evaluations) == NUM_STEPS
    assert peaks.evaluations == peaks.steps


def test_an_evaluation_that_makes_all_logits_would_be_seen(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = Engine.evaluate

    def wasteful(engine: Engine, micro_batches: Any) -> tuple[float, int]:
        kept = evaluate(engine, micro_batches)
        torch.ones(T, 1) @ torch.ones(1, V)
        return kept

    monkeypatch.setattr(Engine, "evaluate", wasteful)
    live = _LiveBytes()
    peaks = Peaks(live)
    train(peaks, watch=live, evaluation=(rows_of(100),), eval_every=1)
    assert peaks.evaluations[0] > peaks.steps[0]


def test_answers_raise_no_peak_of_training(train: Callable[..., Any]) -> None:
    live = _LiveBytes()
    peaks = Peaks(live)
    prompt = SamplePrompt(text="", input_ids=rows_of(7, T - 4).input_ids[0].tolist())
    samples = SamplePrompts(prompts=[prompt], decode=str, stop_ids=frozenset(), max_new_tokens=4)
    train(peaks, watch=live, samples=samples)
    assert peaks.answers[-1] == peaks.steps[-1]


def test_more_held_out_rows_need_no_more_memory(make_trainer: Make, wide_model: Path, tmp_path: Path) -> None:
    peaks = []
    for count in (2, 8):
        held_out = tuple(rows_of(index) for index in range(count))
        folder = tmp_path / str(count)
        with make_trainer(folder, steps=Steps(), model=wide_model, evaluation=held_out) as trainer:
            trainer.load()
            with _LiveBytes() as live:
                trainer.evaluate()
            peaks.append(live.peak)
    assert peaks[0] == peaks[1]


def test_no_tensor_is_as_large_as_the_logits_of_a_row(train: Callable[..., Any]) -> None:
    largest = Largest()
    train(watch=largest, evaluation=(rows_of(100),), eval_every=1)
    assert 0 < largest.elements < T * V
    with largest:  # what it must be able to see
        torch.ones(T, 1) @ torch.ones(1, V)
    assert largest.elements == T * V


def test_a_wider_held_out_row_is_planned_for_before_anything_is_loaded(
    make_trainer: Make, wide_model: Path, tmp_path: Path
) -> None:
    def predicted(*held_out: Rows) -> int:
        return make_trainer(
            tmp_path / "out", steps=Steps(), model=wide_model, evaluation=held_out
        ).planned.prediction.device_bytes

    assert predicted(rows_of(9)) == predicted() < predicted(rows_of(9, 2 * T))
