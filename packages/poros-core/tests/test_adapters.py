"""LoRA through PEFT: what may be adapted, what it starts from, and that stock PEFT would have made the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import get_peft_model, get_peft_model_state_dict
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from poros.adapters import ADAPTER, lora_layers
from poros.errors import ConfigError
from poros.interfaces import ParityCase
from poros.model import LoadedModel, MetaModel, load_model
from poros.parity.case_run import CaseRun, case_meta, case_numerics, case_source
from poros.plugins import Registry
from poros.settings import Plan

StartRun = Callable[..., CaseRun]
MakeMeta = Callable[..., MetaModel]

LEAVES = "'down_proj', 'gate_proj', 'k_proj', 'o_proj', 'q_proj', 'up_proj', 'v_proj'"


@pytest.fixture
def make_meta(tiny_case: ParityCase, registry: Registry) -> MakeMeta:
    def make(**lora: Any) -> MetaModel:
        return case_meta(replace(tiny_case, lora={"rank": 2, **lora}), registry)[0]

    return make


def adapted(meta: MetaModel) -> set[str]:
    return {name for name, _ in lora_layers(meta.blocks)}


# ---- targets


def test_the_architecture_s_targets_are_the_default(make_meta: MakeMeta) -> None:
    assert len(adapted(make_meta())) == 4 * 7


def test_targets_are_leaf_names(make_meta: MakeMeta) -> None:
    assert adapted(make_meta(targets=("q_proj",))) == {f"{i}.self_attn.q_proj" for i in range(4)}


def test_only_the_named_blocks_are_adapted(make_meta: MakeMeta) -> None:
    assert {name.split(".")[0] for name in adapted(make_meta(blocks=(3, 0)))} == {"0", "3"}


@pytest.mark.parametrize("targets", [("nope",), ("q_proj", "nope"), ("self_attn.q_proj",), (".*",)])
def test_a_target_that_matches_nothing_is_refused_with_the_leaf_names(
    targets: tuple[str, ...], make_meta: MakeMeta
) -> None:
    with pytest.raises(ConfigError, match=rf"matches no module: expected leaf names among \[{LEAVES}\]"):
        make_meta(targets=targets)


def test_a_near_miss_is_suggested(make_meta: MakeMeta) -> None:
    with pytest.raises(ConfigError, match=r"Did you mean `q_proj`\?"):
        make_meta(targets=("q_porj",))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_the_vocabulary_matrices_are_refused_by_name(
    target: str, tied: bool, tiny_case: ParityCase, registry: Registry
) -> None:
    def make_config() -> Qwen2Config:
        config: Qwen2Config = tiny_case.make_config()
        config.tie_word_embeddings = tied
        return config

    case = replace(tiny_case, make_config=make_config, lora={"targets": ("q_proj", target)})
    with pytest.raises(ConfigError, match=rf"vocabulary matrices is not offered: .* got `{target}`"):
        case_meta(case, registry)


@pytest.mark.parametrize("blocks", [(4,), (-1,), (0, 17)])
def test_a_block_that_does_not_exist_is_refused(blocks: tuple[int, ...], make_meta: MakeMeta) -> None:
    with pytest.raises(ConfigError, match=r"does not exist: expected 0 to 3, got \[(4|-1|17)\]"):
        make_meta(blocks=blocks)


def test_a_target_that_no_adapted_block_has_is_refused(
    tiny_case: ParityCase, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hybrid model: only its first block has the layer that is asked for in its last."""
    architecture = registry.architectures["qwen2"].value
    build = architecture.build

    def hybrid(self: Any, config: Any) -> nn.Module:
        model = build(self, config)
        model.get_submodule("model.layers.0").linear_attn = nn.Linear(8, 8, device="meta")
        return model

    monkeypatch.setattr(architecture, "build", hybrid)
    lora = {"rank": 2, "targets": ("q_proj", "linear_attn"), "blocks": (3,)}
    with pytest.raises(ConfigError, match="got `linear_attn`"):
        case_meta(replace(tiny_case, lora=lora), registry)


@pytest.mark.parametrize("setting", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(
    ("pattern", "lora"),
    [
        ("nope", {}),
        ("q_pro", {}),
        (r"layers\.9\.self_attn\.q_proj", {}),
        (r"layers\.1\.self_attn\.q_proj", {"blocks": (0,)}),
        ("q_proj", {"targets": ("v_proj",)}),
    ],
)
def test_a_pattern_that_matches_no_adapted_module_is_refused(
    setting: str, pattern: str, lora: dict[str, Any], make_meta: MakeMeta
) -> None:
    with pytest.raises(ConfigError, match="matches no adapted module") as caught:
        make_meta(**lora, **{setting: {"up_proj|v_proj": 4, pattern: 4}})
    assert f"got `{pattern}` (lora.{setting})" in str(caught.value)


def test_a_pattern_that_is_no_regular_expression_is_refused(make_meta: MakeMeta) -> None:
    with pytest.raises(ConfigError, match=r"expected a regular expression, got `q_proj\(` \(missing \)"):
        make_meta(rank_pattern={"q_proj(": 4})


# ---- what PEFT itself makes


LORAS: tuple[dict[str, Any], ...] = (
    {"alpha": 5},
    {"alpha": 5, "use_rslora": True},
    {
        "use_rslora": True,
        "rank_pattern": {r"layers\.2\.self_attn\.q_proj": 8, "down_proj": 3},
        "alpha_pattern": {"q_proj": 7, r"layers\.0\.mlp\.up_proj": 0.5},
    },
    {"blocks": (1, 3), "targets": ("q_proj", "up_proj"), "dropout": 0.25},
)


def stock(meta: MetaModel) -> nn.Module:
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(meta.config)
    peft_model: nn.Module = get_peft_model(base, meta.lora_config)
    return peft_model


@pytest.mark.parametrize("lora", LORAS)
def test_ranks_scalings_and_dropout_are_those_of_stock_peft(
    lora: dict[str, Any], make_meta: MakeMeta
) -> None:
    meta = make_meta(**lora)
    theirs = dict(lora_layers(stock(meta).get_submodule(f"base_model.model.{meta.parts.blocks}")))
    found = {}
    for kind in meta.kinds:
        for block in kind.blocks:
            for path, layer in lora_layers(kind.prototype):
                found[f"{block}.{path}"] = layer
    assert found.keys() == theirs.keys()
    for name, layer in found.items():
        assert layer.scaling[ADAPTER] == theirs[name].scaling[ADAPTER]
        assert layer.r[ADAPTER] == theirs[name].r[ADAPTER]
        assert repr(layer.lora_dropout[ADAPTER]) == repr(theirs[name].lora_dropout[ADAPTER])


@pytest.mark.parametrize("lora", LORAS)
def test_names_and_shapes_are_those_that_stock_peft_saves(lora: dict[str, Any], start_run: StartRun) -> None:
    model = start_run(lora={"rank": 2, **lora}).model
    theirs = get_peft_model_state_dict(stock(model.meta))
    assert {n: t.shape for n, t in model.adapter_tensors().items()} == {n: t.shape for n, t in theirs.items()}


# ---- initial values


@pytest.fixture
def load(tiny_case: ParityCase, registry: Registry, cpu: torch.device) -> Callable[..., LoadedModel]:
    def make(seed: int, **lora: Any) -> LoadedModel:
        case = replace(tiny_case, lora={"rank": 2, **lora})
        meta, weight_format = case_meta(case, registry)
        return load_model(
            meta,
            source=case_source(meta, cpu),
            weight_format=weight_format,
            numerics=case_numerics(case),
            plan=Plan(),
            device=cpu,
            seed=seed,
        )

    return make


def test_two_builds_with_the_same_seed_start_from_the_same_bits(load: Callable[..., LoadedModel]) -> None:
    torch.manual_seed(1)
    first = load(5).bank.weights["lora_A"]
    torch.manual_seed(2)
    assert torch.equal(first, load(5).bank.weights["lora_A"])


def test_another_seed_starts_every_lora_a_from_other_values(load: Callable[..., LoadedModel]) -> None:
    first, second = (load(seed).adapter_tensors() for seed in (5, 6))
    assert not any(torch.equal(first[name], second[name]) for name in first if "lora_A" in name)


def test_no_two_layers_start_from_the_same_values(load: Callable[..., LoadedModel]) -> None:
    tensors = [t for name, t in load(5).adapter_tensors().items() if "lora_A" in name]
    assert len({t.numpy().tobytes() for t in tensors}) == len(tensors) == 4 * 7


def test_a_layer_starts_from_the_same_values_whichever_others_are_adapted(
    load: Callable[..., LoadedModel],
) -> None:
    everything = load(5).adapter_tensors()
    some = load(5, blocks=(2,), targets=("v_proj", "k_proj")).adapter_tensors()
    assert all(torch.equal(everything[name], tensor) for name, tensor in some.items())


def test_lora_b_starts_at_zero_and_lora_a_within_peft_s_bound(load: Callable[..., LoadedModel]) -> None:
    """PEFT draws lora_A with kaiming_uniform_(a=sqrt(5)): uniform within 1/sqrt(in_features)."""
    bank = load(5).bank
    assert not bank.weights["lora_B"].any()
    for _, tensor, view in bank.tensors(bank.weights):
        if tensor.group == "lora_A":
            bound = tensor.shape[1] ** -0.5
            assert bound / 2 < view.abs().max() <= bound


def test_making_adapters_leaves_the_default_generator_alone(load: Callable[..., LoadedModel]) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    load(5)
    assert torch.equal(torch.get_rng_state(), state)
