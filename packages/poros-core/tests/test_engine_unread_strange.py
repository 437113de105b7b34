"""What a recompute leaves out of layers that do what no built-in family does: rather nothing than one too many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from poros.engine.unread import unread_products
from poros.interfaces import BlockContext, ParityCase
from poros.model import MetaModel
from poros.parity.case_run import start_case
from poros.plugins import Registry
from poros.settings import Plan

Layer = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def meta(tiny_case: ParityCase, registry: Registry, cpu: torch.device) -> MetaModel:
    """Four Qwen2 layers, of which these tests replace the call."""
    return start_case(tiny_case, Plan(residency="resident"), registry, cpu).model.meta


def found(meta: MetaModel, layer: Layer) -> frozenset[str]:
    """Return what is left out where ``layer`` is what a block computes."""

    def call_block(
        self: object, block: nn.Module, hidden: torch.Tensor, context: BlockContext, layer_type: str
    ) -> torch.Tensor:
        return layer(block, hidden)

    # A class of its own: results are kept by the architecture's type.
    architecture = type("Strange", (type(meta.architecture),), {"call_block": call_block})()
    return unread_products(replace(meta, architecture=architecture), meta.kinds[0])


def residual(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    return hidden + block.mlp(hidden)


class KeepsAttribute(torch.autograd.Function):
    """Keeps its output past `save_for_backward`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        kept = torch.tanh(x)
        ctx.kept = {"output": kept}
        return kept.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * (1 - ctx.kept["output"] ** 2)


def test_the_last_product_of_a_plain_residual_sum_is_left_out(meta: MetaModel) -> None:
    assert found(meta, residual) == {"mlp.down_proj"}


def test_what_a_function_keeps_as_an_attribute_is_read(meta: MetaModel) -> None:
    def layer(block: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + KeepsAttribute.apply(block.mlp(hidden))

    assert found(meta, layer) == frozenset()


def test_what_hooks_of_the_block_s_own_may_keep_is_read(meta: MetaModel) -> None:
    def layer(block: Any, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return hidden + torch.tanh(block.mlp(hidden))

    assert found(meta, layer) == frozenset()


def test_what_a_checkpointed_function_closes_over_is_read(meta: MetaModel) -> None:
    def layer(block: Any, hidden: torch.Tensor) -> torch.Tensor:
        gate = block.mlp.down_proj(block.mlp.up_proj(hidden))
        return checkpoint(lambda x: x * gate, hidden, use_reentrant=False)  # type: ignore[no-any-return]

    assert "mlp.down_proj" not in found(meta, layer)


def test_a_product_that_is_called_past_its_hooks_is_not_left_out(meta: MetaModel) -> None:
    def layer(block: Any, hidden: torch.Tensor) -> torch.Tensor:
        mlp = block.mlp
        return hidden + mlp.down_proj.forward(
            torch.sigmoid(mlp.gate_proj.forward(hidden)) * mlp.up_proj(hidden)
        )

    assert found(meta, layer) == frozenset()


def test_a_layer_that_reads_values_leaves_nothing_out_and_says_so(meta: MetaModel) -> None:
    def layer(block: Any, hidden: torch.Tensor) -> torch.Tensor:
        product = block.mlp(hidden)
        return hidden + product if product.sum() > 0 else hidden - product

    with pytest.warns(RuntimeWarning, match="cannot be found without values .*DataDependent"):
        assert found(meta, layer) == frozenset()


def test_kinds_that_differ_in_a_constant_alone_are_told_apart(meta: MetaModel) -> None:
    def call_block(
        self: object, block: Any, hidden: torch.Tensor, context: BlockContext, layer_type: str
    ) -> torch.Tensor:
        output = residual(block, hidden)
        return torch.sigmoid(output) if block.squashes else output

    architecture = type("Strange", (type(meta.architecture),), {"call_block": call_block})()
    strange, (kind,) = replace(meta, architecture=architecture), meta.kinds
    results = []
    for squashes in (False, True):
        kind.prototype.squashes = squashes
        results.append(unread_products(strange, kind))
    del kind.prototype.squashes
    assert results == [{"mlp.down_proj"}, frozenset()]


def test_inference_mode_around_the_search_changes_nothing(meta: MetaModel) -> None:
    """There autograd keeps nothing, and every product would look unread."""
    with torch.inference_mode():
        assert found(meta, residual) == {"mlp.down_proj"}


def test_another_default_device_changes_nothing(meta: MetaModel) -> None:
    with torch.device("meta"):
        assert found(meta, residual) == {"mlp.down_proj"}
