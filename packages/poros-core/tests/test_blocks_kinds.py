"""Which blocks share a template: only those that no forward could tell apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from poros.blocks.kinds import classify_blocks
from poros.interfaces import BlockStates
from poros.parity.case_run import CaseRun
from poros_quant import Bf16Bitwise

StartRun = Callable[..., CaseRun]


class Block(nn.Module):
    """Two norms, told apart by whatever is set on them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_idx = 0
        self.first = nn.LayerNorm(8)
        self.second = nn.LayerNorm(8)


def kinds_of(blocks: list[Block], layer_types: list[str] | None = None) -> list[tuple[int, ...]]:
    types = layer_types or ["full_attention"] * len(blocks)
    states = [BlockStates()] * len(blocks)
    found = classify_blocks(nn.ModuleList(blocks), types, Bf16Bitwise(), torch.bfloat16, states=states)
    return [kind.blocks for kind in found]


def test_equal_blocks_are_one_kind_whatever_their_index() -> None:
    blocks = [Block() for _ in range(3)]
    for index, block in enumerate(blocks):
        block.layer_idx = index
    assert kinds_of(blocks) == [(0, 1, 2)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eps", 1e-3),
        ("sliding_window", 4096),
        ("is_causal", False),
        ("hidden_act", "gelu"),
        ("_scale", 0.5),
        ("window", (4, 4)),
        ("sections", [8, 12]),
        ("factors", {"a": 2.0}),
        ("dtype", torch.float16),
        ("eps", None),
    ],
)
def test_a_block_that_differs_in_one_constant_is_another_kind(name: str, value: Any) -> None:
    blocks = [Block() for _ in range(3)]
    setattr(blocks[1].second, name, value)
    assert kinds_of(blocks) == [(0, 2), (1,)]


def test_training_mode_does_not_make_a_kind() -> None:
    blocks = [Block(), Block()]
    blocks[1].eval()
    assert kinds_of(blocks) == [(0, 1)]


def test_another_class_at_the_same_place_is_another_kind() -> None:
    blocks = [Block(), Block()]
    blocks[1].second = nn.RMSNorm(8, eps=1e-5, elementwise_affine=True)  # type: ignore[assignment]
    blocks[0].second = nn.LayerNorm(8, bias=False)
    assert kinds_of(blocks) == [(0,), (1,)]


def test_another_shape_is_another_kind() -> None:
    blocks = [Block(), Block()]
    blocks[1].second = nn.LayerNorm(9)
    assert kinds_of(blocks) == [(0,), (1,)]


def test_another_layer_type_is_another_kind() -> None:
    assert kinds_of([Block(), Block()], ["full_attention", "sliding_attention"]) == [(0,), (1,)]


@pytest.mark.parametrize(
    "lora",
    [
        {"rank": 2, "rank_pattern": {r"layers\.1\.mlp\.up_proj": 3}},
        {"rank": 2, "alpha_pattern": {r"layers\.1\.mlp\.up_proj": 3}},
        {"rank": 2, "blocks": (0, 2, 3)},
    ],
    ids=["rank", "alpha", "no adapter"],
)
def test_a_block_with_another_adapter_is_another_kind(lora: dict[str, Any], start_run: StartRun) -> None:
    assert [kind.blocks for kind in start_run(lora=lora).model.kinds] == [(0, 2, 3), (1,)]


def test_equal_decoder_layers_are_one_kind(start_run: StartRun) -> None:
    assert [kind.blocks for kind in start_run().model.kinds] == [(0, 1, 2, 3)]
