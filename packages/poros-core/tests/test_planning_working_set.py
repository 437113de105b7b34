"""What the planner believes that a visit holds, against what a visit holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend

from poros.adapters import base_linears
from poros.engine.workspace import Workspace, workspace_elements
from poros.parity.case_run import CaseRun, case_numerics
from poros.planning import working_set
from poros.planning.working_set import _LiveBytes, working_set_bytes
from poros.settings import Numerics, Plan


def _simulated(run: CaseRun, *, batch: int, tokens: int, device_type: str = "cpu") -> int:
    numerics = case_numerics(run.case)
    return working_set_bytes(run.model.meta, numerics, batch=batch, tokens=tokens, device_type=device_type)


def test_the_working_set_of_a_real_visit_is_the_simulated_one(start_run: Callable[..., CaseRun]) -> None:
    run = start_run(Plan(num_slots=2, workspace=True))
    engine, kind = run.engine, run.model.kinds[0]
    template = engine._templates.get(kind.blocks[0], 0, training=True)
    static = engine._states.get((2, 8), kind)
    static.hidden.normal_()
    static.gradient.normal_()
    with _LiveBytes() as live:
        template.backward(
            static.hidden, static.gradient, static.context, static.states, static.state_gradients, ()
        )
    assert live.peak == _simulated(run, batch=2, tokens=8)
    run.close()


def test_what_a_kept_forward_leaves_is_the_simulated_one(start_run: Callable[..., CaseRun]) -> None:
    run = start_run(Plan(residency="resident", workspace=True))
    engine, kind = run.engine, run.model.kinds[0]
    template = engine._templates.get(0, None, training=True)
    static = engine._states.get((2, 8), kind)
    static.hidden.normal_()
    with _LiveBytes() as live:
        recorded = template.record(static.hidden.clone(), static.context, {}, ())
        alive = live.count()
    assert recorded.output.requires_grad
    numerics = case_numerics(run.case)
    simulated = working_set.kept_bytes(run.model.meta, numerics, batch=2, tokens=8, device_type="cpu")
    assert simulated == (alive,)
    run.close()


@pytest.mark.parametrize("adapted", [(0, 2), (1, 3)], ids=["first kind", "last kind"])
def test_blocks_with_an_adapter_hold_more_than_blocks_without(
    start_run: Callable[..., CaseRun], adapted: tuple[int, ...]
) -> None:
    both = start_run(lora={"rank": 2})
    run = start_run(lora={"rank": 2, "blocks": adapted})
    numerics = case_numerics(run.case)
    kept = [
        working_set.kept_bytes(r.model.meta, numerics, batch=2, tokens=8, device_type="cpu")
        for r in (both, run)
    ]
    by_block = {
        block: size for kind, size in zip(run.model.kinds, kept[1], strict=True) for block in kind.blocks
    }
    assert {block for block, size in by_block.items() if size == kept[0][0]} == set(adapted)
    assert _simulated(run, batch=2, tokens=8) == _simulated(both, batch=2, tokens=8)
    both.close()
    run.close()


def test_the_working_set_grows_with_the_rows_of_a_micro_batch(start_run: Callable[..., CaseRun]) -> None:
    run = start_run()
    one, two = (_simulated(run, batch=batch, tokens=16) for batch in (1, 2))
    assert one < two
    run.close()


def test_flash_attention_holds_no_scores(start_run: Callable[..., CaseRun]) -> None:
    run = start_run()
    numerics = replace(case_numerics(run.case), compute_dtype=torch.bfloat16)
    assert (
        working_set.attention_backend(torch.device("cuda"), torch.bfloat16, masked=False, head_dim=16)
        == SDPBackend.FLASH_ATTENTION
    )

    def growth(device_type: str) -> float:
        """Return how much faster than linearly memory grows with the length."""
        short, long = (
            working_set_bytes(run.model.meta, numerics, batch=64, tokens=tokens, device_type=device_type)
            for tokens in (256, 1024)
        )
        return long / short / 4

    assert growth("cuda") <= 1.0
    assert growth("cpu") > 2.0
    run.close()


def test_deterministic_flash_attention_sums_short_batches_in_several_copies(
    start_run: Callable[..., CaseRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_run()
    numerics = replace(case_numerics(run.case), compute_dtype=torch.bfloat16)
    found = []
    for multiprocessors in (1, 10_000):
        monkeypatch.setattr(working_set, "_multiprocessors", lambda count=multiprocessors: count)
        working_set._simulate.cache_clear()
        found.append(working_set_bytes(run.model.meta, numerics, batch=1, tokens=128, device_type="cuda"))
    working_set._simulate.cache_clear()
    assert found[1] > found[0]
    run.close()


def test_one_buffer_serves_every_kind_of_block() -> None:
    assert workspace_elements([(128, 128), (512,)], per_visit=True) == 512
    assert workspace_elements([(128, 128), (512,)], per_visit=False) == 512
    assert workspace_elements([(128, 256), (200,)], per_visit=True) == 384
    assert workspace_elements([], per_visit=True) == 0


@pytest.mark.parametrize("per_visit", [True, False])
def test_layers_share_the_buffer(start_run: Callable[..., CaseRun], per_visit: bool) -> None:
    run = start_run()
    kind = run.model.kinds[0]
    workspace = Workspace(run.model.kinds, torch.float32, torch.device("cpu"), per_visit=per_visit)
    linears = list(base_linears(kind.prototype))
    workspace.bind(linears)
    places = [linear.workspace if per_visit else linear.scratch for _, linear in linears]
    starts = {place.data_ptr() for place in places if place is not None}
    assert len(starts) == (len(linears) if per_visit else 1)
    for _, linear in linears:
        linear.workspace = linear.scratch = None
    run.close()


def test_numerics_decide_the_dtype_of_what_is_held(start_run: Callable[..., CaseRun]) -> None:
    run = start_run()
    wide, narrow = (
        working_set_bytes(
            run.model.meta,
            Numerics(compute_dtype=dtype, storage_dtype=dtype),
            batch=1,
            tokens=64,
            device_type="cpu",
        )
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert narrow < wide
    run.close()
