"""Every parameter comes from a named file tensor; every other file tensor is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from poros.checkpoint import MappedSource, SafetensorsSource, check_names
from poros.errors import CheckpointError
from poros.interfaces import TensorSource

EXPECTED = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
)
TIED = {"lm_head.weight": "model.embed_tokens.weight"}


class Source:
    """A `TensorSource` in memory."""

    fingerprint = "test"

    def __init__(self, tensors: dict[str, torch.Tensor] | Sequence[str]) -> None:
        self.tensors = tensors if isinstance(tensors, dict) else {name: torch.zeros(2, 2) for name in tensors}

    def names(self) -> Sequence[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def load(self, name: str, device: torch.device) -> torch.Tensor:
        return self.tensors[name].to(device)


def test_plain_names_map_to_themselves() -> None:
    assert check_names(Source(EXPECTED), EXPECTED) == {name: name for name in EXPECTED}


@pytest.mark.parametrize(
    ("file_names", "ignored"),
    [
        (["language_model." + name for name in EXPECTED], ()),
        ([name.replace("model.", "model.language_model.") for name in EXPECTED], ()),
        ([name.removeprefix("model.") for name in EXPECTED], ()),
        (
            ["language_model." + name for name in EXPECTED] + ["vision_tower.a", "mtp.b"],
            (r"vision_tower\..*", r"mtp\..*"),
        ),
    ],
)
def test_a_wrappers_prefix_is_found(file_names: list[str], ignored: tuple[str, ...]) -> None:
    names = check_names(Source(file_names), EXPECTED, ignored=ignored)
    assert list(names) == list(EXPECTED)
    assert list(names.values()) == file_names[: len(EXPECTED)]


def test_a_renamed_key_is_fatal_and_named_with_its_nearest() -> None:
    renamed = [name.replace("q_proj", "q_projj") for name in EXPECTED]
    with pytest.raises(
        CheckpointError, match=r"1 missing: `model\.layers\.0\.self_attn\.q_proj\.weight`.*q_projj"
    ):
        check_names(Source(renamed), EXPECTED)


def test_a_renamed_key_is_fatal_under_a_prefix() -> None:
    renamed = ["language_model." + name.replace("q_proj", "qq") for name in EXPECTED]
    with pytest.raises(
        CheckpointError, match=r"`language_model\.model\.layers\.0\.self_attn\.q_proj\.weight`"
    ):
        check_names(Source(renamed), EXPECTED)


def test_many_missing_names_are_counted() -> None:
    wanted = [f"model.layers.{i}.x" for i in range(9)]
    with pytest.raises(CheckpointError, match=r"9 missing.* and 4 more"):
        check_names(Source(["other"]), wanted)


def test_an_unknown_extra_tensor_is_listed_as_an_error() -> None:
    with pytest.raises(CheckpointError, match=r"1 more: `model\.layers\.0\.experts\.w`"):
        check_names(Source([*EXPECTED, "model.layers.0.experts.w"]), EXPECTED)


def test_ignored_patterns_match_whole_names_only() -> None:
    with pytest.raises(CheckpointError, match=r"mtp_and_more"):
        check_names(Source([*EXPECTED, "mtp_and_more"]), EXPECTED, ignored=["mtp"])


def test_rotary_buffers_are_harmless() -> None:
    names = [*EXPECTED, "model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]
    assert len(check_names(Source(names), EXPECTED)) == len(EXPECTED)


def test_two_layouts_in_one_folder_are_refused() -> None:
    both = [*EXPECTED, *("language_model." + name for name in EXPECTED)]
    with pytest.raises(CheckpointError, match=r"4 more"):
        check_names(Source(both), EXPECTED)


def test_a_tied_head_may_be_absent() -> None:
    assert "lm_head.weight" not in check_names(Source(EXPECTED[:-1]), EXPECTED[:-1], tied=TIED)


def test_a_tied_head_may_repeat_the_embedding() -> None:
    table = torch.randn(4, 2)
    tensors = {name: torch.zeros(2) for name in EXPECTED[1:3]} | dict.fromkeys(
        (EXPECTED[0], EXPECTED[3]), table
    )
    assert len(check_names(Source(tensors), EXPECTED[:-1], tied=TIED)) == 3


@pytest.mark.parametrize(
    "head", [torch.ones(2, 2), torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.bfloat16)]
)
def test_a_tied_head_that_differs_is_refused(head: torch.Tensor) -> None:
    source = Source(EXPECTED)
    source.tensors["lm_head.weight"] = head
    with pytest.raises(CheckpointError, match=r"`lm_head\.weight` equal to `model\.embed_tokens\.weight`"):
        check_names(source, EXPECTED[:-1], tied=TIED)


def test_a_head_without_tying_is_unknown() -> None:
    with pytest.raises(CheckpointError, match=r"lm_head"):
        check_names(Source(EXPECTED), EXPECTED[:-1])


def test_a_mapped_source_speaks_the_models_names() -> None:
    tensors = {"language_model." + name: torch.randn(2, index + 1) for index, name in enumerate(EXPECTED)}
    source = Source(tensors)
    mapped: TensorSource = MappedSource(source, check_names(source, EXPECTED))
    assert mapped.names() == EXPECTED
    assert mapped.fingerprint == source.fingerprint
    for name in EXPECTED:
        assert mapped.shape(name) == source.shape("language_model." + name)
        assert torch.equal(mapped.load(name, torch.device("cpu")), tensors["language_model." + name])


def test_a_mapped_source_hides_the_files_other_tensors() -> None:
    source = Source([*EXPECTED, "mtp.x"])
    mapped = MappedSource(source, check_names(source, EXPECTED, ignored=["mtp.x"]))
    with pytest.raises(CheckpointError, match=r"`mtp\.x`"):
        mapped.shape("mtp.x")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_size", ["1GB", "1KB"])
def test_what_transformers_saves_feeds_every_parameter(tmp_path: Path, tied: bool, shard_size: str) -> None:
    config = Qwen2Config(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    state = {name: t for name, t in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    source = SafetensorsSource(tmp_path)
    mapped = MappedSource(source, check_names(source, state, tied=TIED if tied else None))
    for name, tensor in state.items():
        assert torch.equal(mapped.load(name, torch.device("cpu")), tensor)
