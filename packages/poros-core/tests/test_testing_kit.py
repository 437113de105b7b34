"""The conformance kit: a right plugin passes every clause, and each way of being wrong is caught by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from transformers import GemmaConfig, Qwen2Config

from poros import hookimpl
from poros.decoder import DecoderArchitecture
from poros.interfaces import Architecture, BlockContext
from poros.testing import CLAUSES, ContractError, ContractReport, assert_contract, check_contract

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def sliding(**changes: Any) -> Qwen2Config:
    """Two full and two sliding blocks with a window of 6 tokens."""
    values = {**SIZES, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2, **changes}
    return Qwen2Config(**values)


class Plain(DecoderArchitecture):
    """A right architecture of somebody else."""

    name: ClassVar[str] = "plain"
    model_types: ClassVar[tuple[str, ...]] = ("qwen2",)
    packs_rows: ClassVar[bool] = True


class Plugin:
    """A plugin that registers one architecture and is not installed."""

    def __init__(self, architecture: type[Architecture]) -> None:
        self._architecture = architecture

    @hookimpl
    def poros_register_architectures(self) -> tuple[type[Architecture], ...]:
        return (self._architecture,)


@pytest.fixture(autouse=True)
def others_out_of_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave ``qwen2`` to the examined plugin."""
    monkeypatch.setenv("POROS_PLUGINS", "poros-quant")


def examine(architecture: type[Architecture], make_config: Callable[[], Any] = sliding) -> ContractReport:
    return check_contract(Plugin(architecture), make_config)


def test_a_right_plugin_passes_every_clause() -> None:
    report = assert_contract(Plugin(Plain), sliding)
    assert report.architecture == "plain"
    assert tuple(report.held) == tuple(CLAUSES)
    assert not report.broken
    assert not report.not_examined


# ---- each way of being wrong


class WrongMask(Plain):
    """Forgets the window."""

    def context(self, *args: Any, **kwargs: Any) -> BlockContext:
        found = super().context(*args, **kwargs)
        masks = dict.fromkeys(found.attention_masks, found.attention_masks["full_attention"])
        return BlockContext(
            position_ids=found.position_ids,
            position_embeddings=found.position_embeddings,
            attention_masks=masks,
        )


class WrongRotary(Plain):
    """Positions start at one."""

    def context(self, *args: Any, **kwargs: Any) -> BlockContext:
        found = super().context(*args, **kwargs)
        shifted = {
            kind: (cos.roll(1, dims=1), sin.roll(1, dims=1))
            for kind, (cos, sin) in found.position_embeddings.items()
        }
        return BlockContext(
            position_ids=found.position_ids,
            position_embeddings=shifted,
            attention_masks=found.attention_masks,
        )


class WrongLayerType(Plain):
    """Takes every block for a full one."""

    def layer_type(self, config: Any, block_index: int) -> str:
        return "full_attention"

    def context(self, model: Any, **kwargs: Any) -> BlockContext:
        return Plain().context(model, **kwargs)


class WrongCall(Plain):
    """Adds the input once more."""

    def call_block(self, block: Any, hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        return super().call_block(block, hidden, *args) + hidden


class WrongScale(Plain):
    """Scales embeddings as Gemma does."""

    def embedding_scale(self, config: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(config.hidden_size**0.5, dtype=dtype)


class UnroundedScale(Plain):
    """Scales as Gemma does, without the rounding to the dtype of the rows: right in float32 alone."""

    name: ClassVar[str] = "unrounded"
    model_types: ClassVar[tuple[str, ...]] = ("gemma",)

    def embedding_scale(self, config: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(config.hidden_size**0.5)


class WrongSoftcap(Plain):
    """Caps logits as Gemma 2 does."""

    def logit_softcap(self, config: Any) -> float:
        return 0.5


class WrongPart(Plain):
    """Looks for the norm elsewhere."""

    def parts(self, config: Any) -> Any:
        return replace(super().parts(config), final_norm="model.final_layernorm")


class WrongTie(Plain):
    """Says that the head is its own."""

    def parts(self, config: Any) -> Any:
        return replace(super().parts(config), tied=False)


class OnTheCpu(Plain):
    """Builds real tensors."""

    def build(self, config: Any) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(config)


class Detached(Plain):
    """Right forward, no gradient to the blocks below."""

    def call_block(self, block: Any, hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        return super().call_block(block, hidden.detach() + 0 * hidden, *args)


class Elsewhere(Plain):
    """Serves another type than its config's."""

    model_types: ClassVar[tuple[str, ...]] = ("llama",)


class NoTargets(Plain):
    """States no targets."""

    default_targets: ClassVar[tuple[str, ...]] = ()


WRONG = [
    (WrongMask, "blocks", "block 2, layer type `sliding_attention`: the attention mask differs"),
    (WrongRotary, "blocks", "block 0, layer type `full_attention`: the rotary tables differ"),
    (
        WrongLayerType,
        "blocks",
        "block 2, layer type `full_attention`: the attention mask differs, those of layer type "
        "`sliding_attention` fit",
    ),
    (WrongCall, "blocks", "block 0, layer type `full_attention`: mask and rotary tables are the same"),
    (WrongScale, "embedding", "expected a scale of about 1, got 5.65685"),
    (WrongSoftcap, "head", "`logit_softcap` do not give Transformers' logits: expected a difference of 0.0"),
    (WrongPart, "parts", "`parts().final_norm` names no module of Qwen2ForCausalLM"),
    (WrongTie, "parts", "`parts().tied` is not what Transformers does: expected True, got False"),
    (OnTheCpu, "parts", "`build` allocates memory: expected every parameter on the meta device"),
    (Elsewhere, "registration", "expected `qwen2` among the `model_types`"),
    (NoTargets, "registration", "`NoTargets.default_targets` is not stated"),
]


@pytest.mark.parametrize(
    ("architecture", "clause", "text"), WRONG, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_wrong_plugin_is_caught_by_name(architecture: type[Architecture], clause: str, text: str) -> None:
    make_config = partial(sliding, tie_word_embeddings=True)
    report = examine(architecture, make_config)
    assert list(report.broken) == [clause]
    assert text in report.broken[clause]
    assert "residency" in report.not_examined


def test_targets_that_leave_blocks_bare_are_caught() -> None:
    from transformers import Qwen3_5TextConfig

    class Hybrid(Plain):
        model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_text",)
        layer_types: ClassVar[tuple[str, ...]] = ("linear_attention", "full_attention")
        default_targets: ClassVar[tuple[str, ...]] = ("q_proj", "v_proj")

    make_config = partial(
        Qwen3_5TextConfig,
        **SIZES,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    report = examine(Hybrid, make_config)
    assert (
        "no adapter in blocks [0, 1, 2] (block 0, layer type `linear_attention`)" in report.broken["targets"]
    )
    assert "'in_proj_qkv'" in report.broken["targets"]


def test_gradients_that_do_not_arrive_are_caught() -> None:
    report = examine(Detached)
    assert list(report.broken) == ["gradients"]
    assert re.search(
        r"expected a finite gradient that is not all zero, got zero \(block 0", report.broken["gradients"]
    )


def test_a_kit_that_cannot_see_a_fault_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from poros.parity import faults

    monkeypatch.setitem(faults.FAULTS, "early-refill", faults.delayed_copies)
    report = examine(Plain)
    assert list(report.broken) == ["controls"]
    assert "The control `early-refill` is not caught" in report.broken["controls"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_hidden_layers": 2}, "too shallow to show streaming: expected 4 blocks or more, got 2"),
        ({"sliding_window": 4096}, "window is too long to show: expected at most 64 tokens, got 4096"),
    ],
)
def test_a_config_that_would_show_nothing_is_refused(changes: dict[str, Any], text: str) -> None:
    broken = examine(Plain, partial(sliding, **changes)).broken
    assert text in next(iter(broken.values()))


def test_a_scale_that_is_wrong_in_16_bits_alone_is_caught() -> None:
    report = examine(UnroundedScale, lambda: GemmaConfig(**SIZES, head_dim=8))
    assert re.search(
        r"expected a scale of about 5\.6.*, got `?5\.65685`? \(input of block 0, torch\.bfloat16\)",
        report.broken["embedding"],
    )


def test_the_error_lists_every_clause_with_its_outcome() -> None:
    with pytest.raises(ContractError) as caught:
        assert_contract(Plugin(WrongScale), sliding)
    shown = str(caught.value)
    assert "registration: holds" in shown
    assert "embedding: BROKEN. `embedding_scale` is not what Transformers does" in shown
    assert "residency: not examined" in shown
    assert isinstance(caught.value, AssertionError)


class Leaking(Plain):
    """Says that it keeps packed samples apart, and leaves their masks out."""

    def call_block(
        self, block: torch.nn.Module, hidden: torch.Tensor, context: BlockContext, layer_type: str
    ) -> torch.Tensor:
        if int((context.position_ids == 0).sum()) > len(context.position_ids):
            context = replace(context, attention_masks={layer_type: None})
        return super().call_block(block, hidden, context, layer_type)


# Its blocks look at values, which nobody can follow without them.
@pytest.mark.filterwarnings("ignore:A recompute makes every product again")
def test_samples_of_a_packed_row_that_see_each_other_are_caught() -> None:
    report = examine(Leaking)
    assert set(report.broken) == {"packing"}
    assert "Samples that share a row see each other" in report.broken["packing"]
