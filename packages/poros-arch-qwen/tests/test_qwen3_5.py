"""What is particular to Qwen3.5: two kinds of blocks, targets that reach both, linear attention, refused features."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from poros.adapters import matched_blocks
from poros.architecture import blockwise_arch_check
from poros.determinism import configure
from poros.errors import ArchitectureError
from poros.parity.case_run import case_meta, start_case
from poros.planning.facts import model_facts
from poros.plugins import load_registry
from poros.run import describe_model
from poros.settings import LoraSettings, Numerics, Plan
from poros_arch_qwen.architectures import Qwen3_5
from poros_arch_qwen.parity_cases import HYBRID_CASES
from poros_arch_qwen.real_shapes import real_config

CPU = torch.device("cpu")
LINEAR = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
# The same products over longer zero-padded rows, float32.
PADDING_TOLERANCE = 1e-5


def four_blocks(**changes: Any) -> Qwen3_5TextConfig:
    values = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    return Qwen3_5TextConfig(**{**values, **changes})


# ---- targets


def test_the_default_targets_reach_every_block() -> None:
    _, _, meta = describe_model(four_blocks(), lora=LoraSettings(rank=2))
    matched = matched_blocks(meta.blocks, meta.targets)
    assert {name: matched[name] for name in LINEAR} == {name: [0, 1, 2] for name in LINEAR}
    assert {name: matched[name] for name in ("q_proj", "o_proj")} == {"q_proj": [3], "o_proj": [3]}
    assert matched["down_proj"] == [0, 1, 2, 3]


def test_attention_targets_alone_reach_one_block_in_four() -> None:
    _, _, meta = describe_model(four_blocks(), lora=LoraSettings(rank=2, targets=("q_proj", "v_proj")))
    assert matched_blocks(meta.blocks, meta.targets) == {"q_proj": [3], "v_proj": [3]}


def test_a_default_target_that_no_block_has_is_left_out() -> None:
    config = four_blocks(layer_types=["full_attention"] * 4)
    _, _, meta = describe_model(config, lora=LoraSettings(rank=2))
    assert not set(LINEAR) & set(meta.targets)


@pytest.mark.parametrize("heads", [3, 0])
def test_linear_heads_that_do_not_share_evenly_are_refused(heads: int) -> None:
    with pytest.raises(
        ArchitectureError, match=rf"a divisor of `linear_num_value_heads` \(4\), got `{heads}`"
    ):
        blockwise_arch_check(
            four_blocks(linear_num_value_heads=4, linear_num_key_heads=heads), load_registry()
        )


# ---- blocks


def test_the_two_kinds_have_layouts_of_their_own_and_plans_count_both() -> None:
    _, _, meta = describe_model(real_config("qwen3.5-27b", 4), lora=LoraSettings(rank=2))
    facts = model_facts(meta, Numerics())
    assert [kind.blocks for kind in facts.kinds] == [(0, 1, 2), (3,)]
    linear, full = facts.kinds
    assert linear.block_bytes != full.block_bytes
    assert facts.store_bytes == 3 * linear.block_bytes + full.block_bytes
    assert (linear.linear_attention is None, full.linear_attention is None) == (False, True)


@pytest.mark.parametrize("length", [7, 70])
def test_padding_to_the_right_changes_no_real_token(length: int) -> None:
    """The recurrent state flows from left to right, and the state after the last token is not used."""
    configure(CPU)
    case = next(case for case in HYBRID_CASES if case.compute_dtype == torch.float32)
    run = start_case(case, Plan(residency="resident"), load_registry(), CPU)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 131, (1, length), generator=generator)
    losses = []
    for width in (length, length + 9, 140):
        padded, labels = torch.zeros(1, width, dtype=torch.int64), torch.full((1, width), -100)
        padded[:, :length] = labels[:, :length] = ids
        losses.append(run.engine.evaluate([Rows(padded, labels)])[0])
    assert losses[1:] == pytest.approx(losses[:1] * 2, abs=PADDING_TOLERANCE * length)


class Rows:
    """A micro-batch."""

    def __init__(self, input_ids: torch.Tensor, labels: torch.Tensor) -> None:
        self.input_ids, self.labels = input_ids, labels


def test_positions_are_the_same_in_time_height_and_width() -> None:
    meta, _ = case_meta(HYBRID_CASES[0], load_registry())
    context = Qwen3_5().context(meta.module, batch=2, tokens=5, device=CPU, dtype=torch.float32)
    rotary = type(meta.module.model.rotary_emb)(config=meta.config)  # type: ignore[union-attr,operator]
    hidden = torch.zeros(2, 5, 48)
    theirs = rotary(hidden, torch.arange(5).view(1, 1, -1).expand(3, 2, -1))
    ours = context.position_embeddings["full_attention"]
    assert all(torch.equal(a[:1], b) for a, b in zip(theirs, ours, strict=True))


def test_linear_attention_gets_no_mask() -> None:
    meta, _ = case_meta(HYBRID_CASES[0], load_registry())
    context = Qwen3_5().context(meta.module, batch=2, tokens=5, device=CPU, dtype=torch.float32)
    assert context.attention_masks["linear_attention"] is None


def test_the_kernels_of_both_parts_are_named() -> None:
    kernels = Qwen3_5().kernels()
    assert set(kernels) == {"chunk_gated_delta_rule", "causal_conv1d"}
    assert "unknown" not in kernels.values()


# ---- refusals


@pytest.mark.parametrize("make_config", [Qwen3_5MoeConfig, Qwen3_5MoeTextConfig])
def test_mixtures_of_experts_are_refused_with_what_would_be_missed(make_config: Any) -> None:
    with pytest.raises(ArchitectureError, match=r"mixture of experts.*`gate_proj` would match only"):
        blockwise_arch_check(make_config(), load_registry())


def test_an_unknown_layer_type_is_refused_with_its_place() -> None:
    config = four_blocks()
    config.layer_types = ["linear_attention", "sliding_attention", "linear_attention", "full_attention"]
    with pytest.raises(ArchitectureError, match=r"got `sliding_attention` \(config.json, layer_types\[1\]\)"):
        blockwise_arch_check(config, load_registry())
