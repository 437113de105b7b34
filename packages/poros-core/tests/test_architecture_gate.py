"""The gate in front of every run: validated, asserted by somebody else, or refused with the reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import transformers
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from poros import hookimpl
from poros.architecture import blockwise_arch_check
from poros.decoder import DecoderArchitecture
from poros.errors import ArchitectureError
from poros.plugins import Registry, load_registry
from poros.run import describe_model


class Llama(DecoderArchitecture):
    """What a third party writes for a family on the plain base."""

    name: ClassVar[str] = "llama"
    model_types: ClassVar[tuple[str, ...]] = ("llama",)


class LlamaPlugin:
    """A plugin of another distribution."""

    @hookimpl
    def poros_register_architectures(self) -> tuple[type[Llama], ...]:
        return (Llama,)


def typed(model_type: str) -> Any:
    return SimpleNamespace(model_type=model_type)


@pytest.mark.parametrize("make_config", [Qwen2Config, Qwen3Config])
def test_an_architecture_of_this_project_is_validated_without_a_warning(
    make_config: type[PreTrainedConfig], registry: Registry
) -> None:
    verdict = blockwise_arch_check(make_config(), registry)
    assert (verdict.status, verdict.distribution) == ("validated", "poros-arch-qwen")
    assert make_config.model_type in verdict.architecture.model_types


def test_a_third_party_s_architecture_warns_that_nothing_is_claimed() -> None:
    registry = load_registry([("llama", "somebody-s-plugin", LlamaPlugin())])
    with pytest.warns(
        UserWarning, match="asserted by distribution `somebody-s-plugin`, not validated.*no claim"
    ):
        verdict = blockwise_arch_check(LlamaConfig(), registry)
    assert verdict.status == "user_asserted"


def test_an_unknown_type_is_refused_with_what_is_supported_and_how_to_add_it(registry: Registry) -> None:
    with pytest.raises(
        ArchitectureError, match=r"`mamba` is not known to Poros: expected one of \["
    ) as caught:
        blockwise_arch_check(typed("mamba"), registry)
    assert "'qwen2', 'qwen3'" in str(caught.value)
    assert "Write a plugin that registers an `Architecture`" in str(caught.value)
    assert "Did you mean" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_near_miss_is_suggested(registry: Registry) -> None:
    with pytest.raises(ArchitectureError, match=r"got `qwen9`.*Did you mean a `qwen\d` model\?"):
        blockwise_arch_check(typed("qwen9"), registry)


def test_a_mixture_of_experts_is_refused_by_name(registry: Registry) -> None:
    config = Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2)
    with pytest.raises(ArchitectureError, match="`qwen3_moe` is a mixture of experts") as caught:
        blockwise_arch_check(config, registry)
    assert "`gate_proj` would match only a shared expert" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["MixtralConfig", "DeepseekV3Config", "GptOssConfig", "OlmoeConfig", "Qwen3_5MoeConfig", "Llama4Config"],
)
def test_experts_are_found_wherever_a_family_states_them(name: str, registry: Registry) -> None:
    with pytest.raises(ArchitectureError, match="is a mixture of experts"):
        blockwise_arch_check(getattr(transformers, name)(), registry)


def test_an_encoder_decoder_is_refused_by_name(registry: Registry) -> None:
    with pytest.raises(ArchitectureError, match="`t5` is an encoder-decoder, which Poros does not train"):
        blockwise_arch_check(transformers.T5Config(), registry)


@pytest.mark.parametrize(
    ("field", "value"),
    [("is_causal", False), ("use_bidirectional_attention", True), ("use_bidirectional_attention", "all")],
)
def test_attention_that_looks_ahead_is_refused_with_the_field(
    field: str, value: Any, registry: Registry
) -> None:
    config = Qwen2Config()
    setattr(config, field, value)
    with pytest.raises(
        ArchitectureError,
        match=rf"feature inside `qwen2`: expected causal attention, got bidirectional attention \(`{field}`",
    ):
        blockwise_arch_check(config, registry)


def test_attention_that_looks_ahead_inside_images_alone_is_served(registry: Registry) -> None:
    config = Qwen2Config()
    config.use_bidirectional_attention = "vision"
    assert blockwise_arch_check(config, registry).status == "validated"


ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "dynamic", "factor": 2.0},
    {"type": "dynamic", "factor": 2.0},
    {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
)


@pytest.mark.parametrize("rope", ROPES, ids=["dynamic", "legacy name", "longrope"])
def test_a_rotary_type_that_depends_on_the_length_is_refused(
    rope: dict[str, Any], registry: Registry
) -> None:
    config = Qwen2Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, rope_scaling=rope)
    expected = rope.get("rope_type", rope.get("type"))
    with pytest.raises(ArchitectureError, match=rf"expected a rotary type among .* got `{expected}`"):
        blockwise_arch_check(config, registry)


@pytest.mark.parametrize("base", ["abc", -1.0, 0, True])
def test_a_rotary_base_that_is_no_positive_number_is_refused(base: Any, registry: Registry) -> None:
    config = Qwen2Config()
    config.rope_parameters = {"rope_type": "default", "rope_theta": base}
    with pytest.raises(ArchitectureError, match=r"positive number as the rotary base.*rope_theta"):
        blockwise_arch_check(config, registry)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 3}, r"a divisor of `num_attention_heads` \(32\), got `3`"),
        ({"num_key_value_heads": 0}, r"got `0` \(config.json, num_key_value_heads"),
        (
            {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 2},
            r"some layers slide, got `0`",
        ),
    ],
    ids=["uneven heads", "no heads", "no window"],
)
def test_attention_that_no_layer_could_compute_is_refused(
    changes: dict[str, Any], words: str, registry: Registry
) -> None:
    with pytest.raises(ArchitectureError, match=words):
        blockwise_arch_check(Qwen2Config(**changes), registry)


def test_values_that_layers_do_not_take_are_refused_with_their_words() -> None:
    with pytest.raises(ArchitectureError, match=r"Cannot build this `qwen2` model.*KeyError: 'nope'"):
        describe_model(Qwen2Config(hidden_size=64, num_hidden_layers=2, hidden_act="nope"))


@pytest.mark.parametrize(
    "rope", [None, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 4.0}]
)
def test_a_rotary_type_that_does_not_is_served(rope: dict[str, Any] | None, registry: Registry) -> None:
    config = Qwen2Config(rope_scaling=rope, max_position_embeddings=32768)
    assert blockwise_arch_check(config, registry).status == "validated"
