"""Products that a recompute leaves out: none that backward reads, all that it does not, and every gradient's bits."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from poros.adapters import base_linears
from poros.blocks.frozen_linear import FrozenLinear
from poros.engine.template import BlockTemplate
from poros.engine.unread import unread_products
from poros.interfaces import ParityCase
from poros.parity.case_run import CaseRun, start_case
from poros.plugins import Registry
from poros.settings import Plan

StartRun = Callable[..., CaseRun]
RESIDENT = Plan(residency="resident", workspace=True)
CASES = (
    "qwen2-nf4",
    "qwen3-bf16-sliding",
    "qwen3_5-nf4",
    "gemma3-nf4",
    "gemma4-dense-bf16",
    "gemma4-shared-nf4-float32",
)
SHAPE = (2, 8)


def gradients(run: CaseRun, block: int, unread: set[str] | None = None) -> tuple[torch.Tensor, ...]:
    """Return all gradients of one block's recompute; None leaves nothing out."""
    template = run.engine._templates.get(block, None, training=False)
    static = run.engine._states.get(SHAPE, template.kind)
    generator = torch.Generator().manual_seed(block)
    for tensor in (static.hidden, static.gradient, *static.states.values(), *static.state_gradients.values()):
        tensor.normal_(generator=generator)
    run.model.bank.load_weights(block, run.engine._region)
    template.materialize()
    template._unread = [layer for path, layer in base_linears(template.module) if path in (unread or ())]
    reads = [spec.name for spec in template.kind.states.reads]
    recorded = template.record(
        static.hidden, static.context, static.states, reads, reads_output=unread is None
    )
    return template.gradients(recorded, static.gradient, static.state_gradients)


@pytest.mark.parametrize("name", CASES)
def test_exactly_what_no_gradient_needs_is_left_out(name: str, registry: Registry, cpu: torch.device) -> None:
    run = start_case(registry.parity_cases()[name].value, RESIDENT, registry, cpu)
    for kind in run.model.kinds:
        block = kind.blocks[0]
        whole = gradients(run, block)
        unread = unread_products(run.model.meta, kind)
        without = gradients(run, block, set(unread))
        assert all(torch.equal(*pair) for pair in zip(whole, without, strict=True))
        for path in {path for path, _ in base_linears(kind.prototype)} - unread:
            assert any(gradient.isnan().any() for gradient in gradients(run, block, {path})), path


def test_the_product_before_the_residual_sum_is_unread_where_no_norm_follows(
    registry: Registry, cpu: torch.device
) -> None:
    found = {}
    for name in ("qwen3-bf16-sliding", "gemma3-nf4"):
        run = start_case(registry.parity_cases()[name].value, RESIDENT, registry, cpu)
        found[name] = [unread_products(run.model.meta, kind) for kind in run.model.kinds]
    assert all(paths == {"mlp.down_proj"} for paths in found["qwen3-bf16-sliding"])
    assert all(paths == frozenset() for paths in found["gemma3-nf4"])


def test_a_step_computes_an_unread_product_once(start_run: StartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every use of a matrix: forward, recompute, gradient of the input."""
    uses: Counter[tuple[int, int]] = Counter()
    matrix = FrozenLinear.matrix

    def counted(self: FrozenLinear) -> torch.Tensor:
        uses[self.out_features, self.in_features] += 1
        return matrix(self)

    run = start_run(Plan(residency="resident"))
    run.train(1)
    monkeypatch.setattr(FrozenLinear, "matrix", counted)
    run.train(1)
    visits = run.model.num_blocks * len(run.micro_batches(0))
    gate_and_up, down = (40, 24), (24, 40)
    assert uses[gate_and_up] == 2 * 3 * visits
    assert uses[down] == 2 * visits


def test_a_kept_forward_whose_backward_has_other_bits_is_recomputed(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = start_run(Plan(residency="resident", kept_blocks=3))
    of = BlockTemplate.gradients

    def other_bits(self: BlockTemplate, recorded: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
        grads = of(self, recorded, *arguments)
        is_recompute = bool(recorded.output.isnan().any())
        return grads if is_recompute else (grads[0] * (1 + 2**-7), *grads[1:])

    monkeypatch.setattr(BlockTemplate, "gradients", other_bits)
    with pytest.warns(RuntimeWarning, match="recomputed in backward after all"):
        kept.train(1)
    assert not any(kept.engine._kept._equal.values())


@dataclass(frozen=True)
class CompiledVisit:
    """A compiled block's gradients with its output read and not read, and the shapes that the first kept for them."""

    gradients: tuple[tuple[torch.Tensor, ...], ...]
    kept_shapes: Counter[tuple[int, ...]]


@pytest.fixture(scope="module")
def compiled_visit(tiny_case: ParityCase, registry: Registry, cpu: torch.device) -> CompiledVisit:
    """Compiling takes seconds: the tests share it.

    In float32, because Inductor's C++ of torch 2.11 computes on with sums that it has not rounded to 16 bits yet.
    """
    case = replace(tiny_case, blocks="compiled", compute_dtype=torch.float32)
    run = start_case(case, RESIDENT, registry, cpu)
    template = run.engine._templates.get(1, None, training=False)
    static = run.engine._states.get(SHAPE, template.kind)
    static.hidden.normal_()
    static.gradient.normal_()
    run.model.bank.load_weights(1, run.engine._region)
    template.materialize()
    shapes: Counter[tuple[int, ...]] = Counter()
    results = []
    for reads_output in (True, False):
        with saved_tensors_hooks(lambda t: (shapes.update([tuple(t.shape[-2:])]), t)[1], lambda t: t):
            recorded = template.record(static.hidden, static.context, {}, (), reads_output=reads_output)
        assert recorded.output.isnan().any() == (not reads_output)
        results.append(template.gradients(recorded, static.gradient, {}))
        if reads_output:
            kept = shapes.copy()
    return CompiledVisit(tuple(results), kept)


def test_compiled_blocks_leave_the_product_out_without_another_bit(compiled_visit: CompiledVisit) -> None:
    assert all(torch.equal(*pair) for pair in zip(*compiled_visit.gradients, strict=True))


def test_a_compiled_block_that_is_kept_holds_gate_and_up_but_not_their_product(
    compiled_visit: CompiledVisit,
) -> None:
    (_, tokens), intermediate = SHAPE, 40
    per_token = [n for shape, n in compiled_visit.kept_shapes.items() if shape == (tokens, intermediate)]
    assert per_token == [2]


def test_a_recompute_never_shares_what_was_compiled_for_a_kept_forward(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are cut in different ways, also where there is nothing to leave out; the compiler looks at the code."""
    codes = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: codes.append(function.__code__))
    run = start_run(RESIDENT, blocks="compiled")
    run.engine._templates.get(0, None, training=True)
    assert len(set(codes)) == len(codes) == 2


FORKING = """
import os, torch
from poros.engine.unread import unread_products
from poros.parity.case_run import case_meta
from poros.plugins import load_registry
registry = load_registry()
meta, _ = case_meta(registry.parity_cases()["qwen2-nf4"].value, registry)
assert unread_products(meta, meta.kinds[0])
torch.ones(1, requires_grad=True).sum().backward()
if (child := os.fork()) == 0:
    torch.ones(1, requires_grad=True).sum().backward()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="autograd has threads for a real device, and cannot be forked"
)
def test_a_process_that_searched_before_it_trained_can_still_be_forked() -> None:
    subprocess.run([sys.executable, "-c", FORKING], check=True)
