"""Case 68: rows that hold several samples. The gates prove each family; here is what the engine makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from poros.decoder import DecoderArchitecture
from poros.engine.packed import PackedContext
from poros.engine.static_states import StaticStates
from poros.errors import UserError
from poros.interfaces import MicroBatch, ParityCase
from poros.parity.case_run import CaseRun, RandomBatch, start_case
from poros.parity.compare import compare
from poros.parity.packing import PackedBatch
from poros.parity.plain import train_plain
from poros.plugins import Registry
from poros.settings import ACCUMULATION_ORDERS, Plan

StartRun = Callable[..., CaseRun]
SAMPLES = (((5, 3, 4), (12,)), ((2, 9, 1), (7, 5)), ((4, 4, 4), (1, 11)))


def packed_batch(rows: Sequence[Sequence[int]], seed: int) -> PackedBatch:
    """Rows of samples of these lengths, all rows equally long."""
    generator = torch.Generator().manual_seed(seed)
    width = sum(rows[0])
    ids = torch.randint(1, 40, (len(rows), width), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in rows])
    labels = torch.where(positions == 0, -100, ids)
    return PackedBatch(ids, labels, positions)


@pytest.fixture
def packed_run(start_run: StartRun, monkeypatch: pytest.MonkeyPatch) -> StartRun:
    """Start runs whose steps hold a plain micro-batch between packed ones."""

    def micro_batches(self: CaseRun, step: int) -> list[MicroBatch]:
        packed = [packed_batch(rows, 10 * step + index) for index, rows in enumerate(SAMPLES)]
        return [packed[0], RandomBatch(packed[1].input_ids, packed[1].labels), *packed[1:]]

    monkeypatch.setattr(CaseRun, "micro_batches", micro_batches)
    return start_run


@pytest.mark.parametrize("order", ACCUMULATION_ORDERS)
def test_streaming_changes_no_bit_of_a_packed_run(packed_run: StartRun, order: str) -> None:
    resident, streamed = packed_run(Plan(residency="resident")), packed_run(Plan(num_slots=2, order=order))
    verdict = compare(resident.train(2), streamed.train(2))
    assert verdict.outcome == "equal", verdict.detail


def test_a_packed_run_equals_ordinary_autograd(packed_run: StartRun) -> None:
    oracle, streamed = packed_run(Plan(residency="resident")), packed_run(Plan(num_slots=2))
    train_plain(oracle, 2)
    verdict = compare(oracle.trajectory, streamed.train(2))
    assert verdict.outcome == "equal", verdict.detail


@pytest.mark.gpu
def test_graphs_change_no_bit_of_a_packed_run(
    packed_run: StartRun, registry: Registry, tiny_case: ParityCase
) -> None:
    cuda = torch.device("cuda")
    eager = start_case(tiny_case, Plan(residency="resident", graphs=False), registry, cuda)
    graphed = start_case(tiny_case, Plan(num_slots=2), registry, cuda)
    verdict = compare(eager.train(4), graphed.train(4))
    assert verdict.outcome == "equal", verdict.detail
    assert graphed.engine.graphs.num_graphs > 0


def test_masks_positions_and_tables_are_those_that_transformers_makes(start_run: StartRun) -> None:
    from transformers.masking_utils import create_causal_mask

    run = start_run(Plan(num_slots=2))
    batch = packed_batch(SAMPLES[1], 0)
    context = PackedContext(run.model.make_context(1, 12), 2).load(batch.position_ids)
    hidden = torch.empty(2, 12, run.model.hidden_size)
    arguments = {"config": run.model.config, "inputs_embeds": hidden, "attention_mask": None}
    try:
        expected = create_causal_mask(**arguments, position_ids=batch.position_ids, cache=None)
    except TypeError:  # before Transformers 5.24
        expected = create_causal_mask(**arguments, position_ids=batch.position_ids, past_key_values=None)
    (mask,) = {id(m): m for m in context.attention_masks.values()}.values()
    assert torch.equal(mask, expected)
    assert torch.equal(context.position_ids, batch.position_ids)
    plain = run.model.make_context(1, 12)
    for name, pair in context.position_embeddings.items():
        for table, alone in zip(pair, plain.position_embeddings[name], strict=True):
            assert torch.equal(table, alone[0][batch.position_ids])


def test_the_context_of_packed_rows_keeps_its_addresses(start_run: StartRun) -> None:
    run = start_run(Plan(num_slots=2))
    states = StaticStates(run.model)
    first, second = (packed_batch(rows, 0).position_ids for rows in (SAMPLES[0], SAMPLES[1]))
    kind = run.model.kinds[0]
    seen = [states.get((2, 12), kind, positions).key for positions in (first, second, first)]
    assert seen[0] == seen[1] == seen[2] != states.get((2, 12), kind).key
    assert torch.equal(states.get((2, 12), kind, second).context.position_ids, second)


def test_an_evaluation_of_packed_rows_is_the_sum_over_its_samples(start_run: StartRun) -> None:
    run = start_run(Plan(num_slots=2), compute_dtype=torch.float32)
    batch = packed_batch(((5, 7),), 3)
    alone = [
        RandomBatch(batch.input_ids[:, start:end], batch.labels[:, start:end])
        for start, end in ((0, 5), (5, 12))
    ]
    (packed, num_packed), (separate, num_separate) = run.engine.evaluate([batch]), run.engine.evaluate(alone)
    assert num_packed == num_separate == 10
    assert packed == pytest.approx(separate, rel=1e-6)


def test_a_family_that_does_not_say_so_is_refused(start_run: StartRun) -> None:
    run = start_run(Plan(num_slots=2))
    run.model.architecture.__class__ = type(
        "Leaky", (DecoderArchitecture,), {"name": "leaky", "model_types": ()}
    )
    with pytest.raises(UserError, match=r"Cannot train on packed rows: .*got `leaky`.*rows.packing: false"):
        run.engine.step([packed_batch(SAMPLES[0], 0)], 0)


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        ([[1, 2, 3, 4]], "begin at 0 with every sample"),
        ([[0, 2, 0, 1]], "begin at 0 with every sample"),
        ([[0, 1, 2]], r"\(1, 4\) positions"),
        ([[0, 1, 0, 1]], "-100 at the first token of every sample"),
    ],
)
def test_bad_positions_and_labels_are_refused(
    positions: list[list[int]], said: str, start_run: StartRun
) -> None:
    ids = torch.tensor([[1, 2, 3, 4]])
    labels = torch.tensor([[-100, 2, 3, 4]])
    with pytest.raises(UserError, match=said):
        start_run(Plan(num_slots=2)).engine.step([PackedBatch(ids, labels, torch.tensor(positions))], 0)
