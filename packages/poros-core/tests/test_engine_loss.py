"""The loss: supervised positions only, in chunks, over the tokens of the whole optimizer step.

Shape letters: B batch, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from poros.engine.loss import LossHead
from poros.engine.targets import IGNORE_INDEX, Targets, count_supervised, make_targets
from poros.errors import UserError
from poros.interfaces import MicroBatch
from poros.parity.case_run import CaseRun
from poros.settings import ACCUMULATION_ORDERS, Plan

StartRun = Callable[..., CaseRun]
CPU = torch.device("cpu")
D, V = 16, 29

# Measured 2026-11-30, x86-64 CPU (AMD EPYC, torch 2.15), float32, sums of 267 terms in another order: loss 1.2e-7,
# norm 1.9e-7 (relative), weights after two steps 1.5e-8 (absolute).
SPLIT_TOLERANCE = 2e-6
WEIGHT_TOLERANCE = 1e-6
# The same machine, chunks of 1, 4 and all positions against the formula: loss 1.2e-7 (relative), gradient 8.5e-8.
CHUNK_TOLERANCE = 1e-6
# The same machine, bfloat16 logits of about 32: they round by up to 0.06; 0.064 was found.
CONFIDENT_TOLERANCE = 0.1


@dataclass(frozen=True)
class Rows:
    """A `MicroBatch`."""

    input_ids: torch.Tensor
    labels: torch.Tensor


def make_row(num_supervised: int, prompt: int = 3) -> torch.Tensor:
    """Return (2, T): ids and labels of a row with this many supervised tokens."""
    generator = torch.Generator().manual_seed(num_supervised)
    ids = torch.randint(1, 61, (prompt + num_supervised,), generator=generator)
    labels = ids.clone()
    labels[:prompt] = IGNORE_INDEX
    return torch.stack([ids, labels])


def collate(rows: Sequence[torch.Tensor], *, extra: int = 0, pad_id: int = 0) -> Rows:
    """Right-pad rows to the longest, and ``extra`` further."""
    width = max(row.shape[1] for row in rows) + extra
    ids = torch.full((len(rows), width), pad_id)
    labels = torch.full((len(rows), width), IGNORE_INDEX)
    for index, row in enumerate(rows):
        ids[index, : row.shape[1]] = row[0]
        labels[index, : row.shape[1]] = row[1]
    return Rows(ids, labels)


# ---- the denominator (case 3)

ROWS = [make_row(count) for count in (2, 200, 5, 60)]
SPLITS = {
    "1 of 4": [ROWS],
    "2 of 2": [ROWS[:2], ROWS[2:]],
    "4 of 1": [[row] for row in ROWS],
}


@dataclass(frozen=True)
class Step:
    loss: float
    norm: float
    supervised: int
    weights: torch.Tensor


def one_step(run: CaseRun, micro_batches: Sequence[MicroBatch]) -> Step:
    output = run.engine.step(micro_batches, 0)
    norm = run.optimizer.clip()
    run.optimizer.step()
    run.optimizer.step()  # the first rate of the case's warm-up is zero
    weights = torch.cat(list(run.model.bank.weights.values()))
    return Step(float(sum(output.losses)), float(norm), output.supervised_tokens, weights)


@pytest.fixture
def start(start_run: StartRun) -> Callable[..., CaseRun]:
    def make(plan: Plan | None = None, chunk: int = 64) -> CaseRun:
        return start_run(plan, compute_dtype=torch.float32, loss_chunk_positions=chunk)

    return make


def assert_agree(found: Step, expected: Step) -> None:
    assert found.supervised == expected.supervised == 2 + 200 + 5 + 60
    assert found.loss == pytest.approx(expected.loss, rel=SPLIT_TOLERANCE)
    assert found.norm == pytest.approx(expected.norm, rel=SPLIT_TOLERANCE)
    torch.testing.assert_close(found.weights, expected.weights, rtol=0, atol=WEIGHT_TOLERANCE)


@pytest.mark.parametrize("split", list(SPLITS)[1:])
def test_the_split_into_micro_batches_does_not_change_the_step(split: str, start: StartRun) -> None:
    whole = one_step(start(), [collate(rows) for rows in SPLITS["1 of 4"]])
    assert_agree(one_step(start(), [collate(rows) for rows in SPLITS[split]]), whole)


@pytest.mark.parametrize(("extra", "pad_id"), [(0, 60), (13, 7)])
def test_padding_does_not_change_the_step(extra: int, pad_id: int, start: StartRun) -> None:
    """Nothing of the padding, its length or its id, reaches a real token under the causal mask."""
    plain = one_step(start(), [collate([row]) for row in ROWS])
    padded = one_step(start(), [collate(rows, extra=extra, pad_id=pad_id) for rows in SPLITS["2 of 2"]])
    assert_agree(padded, plain)


def test_the_losses_of_a_step_add_up_to_the_mean_over_its_supervised_tokens(start: StartRun) -> None:
    run = start()
    micro_batches = [collate(rows) for rows in SPLITS["2 of 2"]]
    total, supervised = run.engine.evaluate(micro_batches)
    assert one_step(run, micro_batches).loss == pytest.approx(total / supervised, rel=SPLIT_TOLERANCE)


def test_a_step_without_supervised_tokens_is_refused(start: StartRun) -> None:
    run = start()
    unsupervised = collate([make_row(0, prompt=4)])
    with pytest.raises(UserError, match=r"Optimizer step 3 has nothing to learn from: .* got 0"):
        run.engine.step([unsupervised, unsupervised], 3)


@pytest.mark.parametrize("order", ACCUMULATION_ORDERS)
def test_a_step_without_micro_batches_is_refused(order: str, start: StartRun) -> None:
    with pytest.raises(UserError, match="nothing to learn from"):
        start(Plan(num_slots=2, order=order)).engine.step([], 0)


def test_a_micro_batch_without_supervised_tokens_adds_nothing(start: StartRun) -> None:
    alone, beside = start(), start()
    rows = collate(ROWS[2:])
    alone.engine.step([rows], 0)
    output = beside.engine.step([rows, collate([make_row(0, prompt=4)])], 0)
    assert output.losses[1] == 0
    for group, gradient in alone.model.bank.gradients.items():
        assert torch.equal(gradient, beside.model.bank.gradients[group])


# ---- one head, against the formula


def make_head(chunk: int = 4, softcap: float | None = None, vocabulary: int = 10) -> LossHead:
    torch.manual_seed(1)
    norm = nn.RMSNorm(D)
    nn.init.normal_(norm.weight)
    return LossHead(
        norm.requires_grad_(False),
        torch.randn(V, D).split(vocabulary),
        compute_dtype=torch.float32,
        chunk_positions=chunk,
        softcap=softcap,
    )


def make_hidden(batch: int = 2, tokens: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (B, T, D) hidden states and (B, T) labels, about half of them supervised."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(0, V, (batch, tokens), generator=generator)
    labels[torch.rand(batch, tokens, generator=generator) < 0.5] = IGNORE_INDEX
    return torch.randn(batch, tokens, D, generator=generator) * 3, labels


def naive(
    head: LossHead, hidden: torch.Tensor, labels: torch.Tensor, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss and its gradient by the formula, with a (B, T, V) tensor."""
    hidden = hidden.clone().requires_grad_()
    logits = head.norm(hidden) @ torch.cat(head.chunks).T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = -logits.log_softmax(-1)[:, :-1].gather(2, labels[:, 1:, None].clamp(min=0)).squeeze(2)
    total = loss[labels[:, 1:] != IGNORE_INDEX].sum()
    (gradient,) = torch.autograd.grad(total, hidden)
    return total.detach(), gradient


@pytest.mark.parametrize("softcap", [None, 2.0, 30.0])
@pytest.mark.parametrize("vocabulary", [1, 10, V])
@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_loss_and_gradient_follow_the_formula_whatever_the_chunks(
    chunk: int, vocabulary: int, softcap: float | None
) -> None:
    head = make_head(chunk, softcap, vocabulary)
    hidden, labels = make_hidden()
    targets = make_targets(labels, CPU)
    expected_loss, expected_gradient = naive(head, hidden, labels, softcap)
    loss, gradient = head.loss_and_gradient(hidden, targets, denominator=7)
    torch.testing.assert_close(loss, expected_loss / 7, rtol=CHUNK_TOLERANCE, atol=0)
    torch.testing.assert_close(gradient, expected_gradient / 7, rtol=0, atol=CHUNK_TOLERANCE)
    torch.testing.assert_close(head.loss_sum(hidden, targets), expected_loss, rtol=CHUNK_TOLERANCE, atol=0)


def test_soft_capping_bounds_the_logits() -> None:
    hidden, _ = make_hidden()
    assert make_head().logits(hidden).abs().max() > 5
    assert make_head(softcap=5.0).logits(hidden).abs().max() <= 5


def test_unsupervised_positions_get_a_gradient_of_exactly_zero() -> None:
    hidden, labels = make_hidden()
    _, gradient = make_head().loss_and_gradient(hidden, make_targets(labels, CPU), denominator=1)
    predicts = F.pad(labels[:, 1:] != IGNORE_INDEX, (0, 1))
    assert gradient[~predicts].eq(0).all()
    assert gradient[predicts].any(-1).all()


def test_a_label_is_predicted_by_the_position_before_it() -> None:
    labels = torch.full((2, 4), IGNORE_INDEX)
    labels[0, 2], labels[1, 3] = 5, 6
    targets = make_targets(labels, CPU)
    assert targets.positions.tolist() == [1, 4 + 2]
    assert targets.tokens.tolist() == [5, 6]


def test_a_row_s_first_token_is_no_target_even_where_it_is_labelled() -> None:
    """Otherwise the last position of one row would predict the first token of the next."""
    micro_batch = Rows(torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64))
    assert count_supervised(micro_batch) == make_targets(micro_batch.labels, CPU).tokens.numel() == 4


def test_a_row_of_one_token_has_no_target() -> None:
    micro_batch = Rows(torch.ones(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.int64))
    assert count_supervised(micro_batch) == 0
    loss, gradient = make_head().loss_and_gradient(
        torch.randn(1, 1, D), make_targets(micro_batch.labels, CPU), 1
    )
    assert loss == 0
    assert not gradient.any()


def test_rows_of_one_token_go_through_the_whole_engine(start: StartRun) -> None:
    run = start()
    one_token = Rows(torch.tensor([[5]]), torch.tensor([[5]]))
    output = run.engine.step([one_token, collate([make_row(4)])], 0)
    assert output.supervised_tokens == 4
    assert output.losses[0] == 0


def test_a_confident_prediction_keeps_its_gradient_in_16_bits() -> None:
    """``p - 1`` of the target is what is left of two nearly equal numbers; a 16-bit sum would leave rounding only."""
    torch.manual_seed(3)
    norm = nn.RMSNorm(D, dtype=torch.bfloat16).requires_grad_(False)
    weight = (F.normalize(torch.randn(V, D)) * 8).to(torch.bfloat16)
    tokens = torch.arange(8)
    hidden = weight[tokens][None].clone()
    head = LossHead(norm, weight.split(10), compute_dtype=torch.bfloat16, chunk_positions=4, softcap=None)
    _, found = head.loss_and_gradient(hidden, Targets(torch.arange(8), tokens), denominator=1)
    exact = hidden.double().requires_grad_()
    logits = F.rms_norm(exact, (D,), norm.weight.double(), norm.eps) @ weight.double().T
    (expected,) = torch.autograd.grad(F.cross_entropy(logits[0], tokens, reduction="sum"), exact)
    assert expected.abs().max() < 1e-3  # the case at hand
    assert (found.double() - expected).norm() / expected.norm() < CONFIDENT_TOLERANCE


def test_the_default_dtype_changes_no_bit() -> None:
    head, (hidden, labels) = make_head(), make_hidden()
    expected = head.loss_and_gradient(hidden, make_targets(labels, CPU), 5)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = head.loss_and_gradient(hidden, make_targets(labels, CPU), 5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
