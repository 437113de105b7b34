"""What of Gemma 4 is refused, what LoRA reaches, and what is counted."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.gemma4 import modeling_gemma4

from poros.architecture import blockwise_arch_check
from poros.checkpoint import load_config
from poros.effective_config import config_notes, effective_config
from poros.errors import ArchitectureError, UserError
from poros.model import MetaModel, make_meta_model
from poros.parity.case_run import RandomBatch, start_case
from poros.planning.prediction import StepShape, predict
from poros.plugins import load_registry
from poros.settings import LoraSettings, Numerics, Plan
from poros_arch_gemma.architectures import Gemma4
from poros_arch_gemma.gemma4_cases import GEMMA4_CASES, gemma4_dense, gemma4_shared
from poros_arch_gemma.gemma4_shapes import gemma4_real_config


def meta_model(config: Any, lora: LoraSettings | None = None) -> MetaModel:
    registry = load_registry()
    return make_meta_model(
        architecture=Gemma4(),
        config=config,
        weight_format=registry.weight_formats["nf4"].value(),
        lora=lora or LoraSettings(rank=4),
        numerics=Numerics(),
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8},
            "mixture",
        ),
        ({"use_bidirectional_attention": "all"}, "bidirectional"),
        ({"num_kv_shared_layers": 4}, "full_attention"),
        ({"num_kv_shared_layers": 6}, "computes its own keys and values"),
        ({"num_kv_shared_layers": -2}, "0 or more blocks"),
    ],
    ids=["experts", "bidirectional", "no-full-writer", "no-writer", "negative"],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ArchitectureError, match=words):
        blockwise_arch_check(gemma4_shared(**changes), load_registry())


def test_image_tokens_that_see_each_other_are_no_reason_to_refuse() -> None:
    config = gemma4_dense(use_bidirectional_attention="vision")
    assert blockwise_arch_check(config, load_registry()).status == "validated"


def test_sharing_that_lives_in_the_cache_is_refused_with_both_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(self: Any, hidden_states: Any, past_key_values: Any = None) -> None: ...

    monkeypatch.setattr(modeling_gemma4.Gemma4TextDecoderLayer, "forward", forward)
    with pytest.raises(ArchitectureError, match=r"Transformers 5\.17 or newer.*got `Transformers \d+\.\d+"):
        Gemma4().check_config(gemma4_shared())
    Gemma4().check_config(gemma4_dense())


def test_default_targets_reach_every_block() -> None:
    for config in (gemma4_dense(), gemma4_shared()):
        meta = meta_model(config)
        assert all(kind.adapter.tensors for kind in meta.kinds)


def test_per_layer_projections_are_adapted_where_they_are_named() -> None:
    targets = ("per_layer_input_gate", "per_layer_projection")
    meta = meta_model(gemma4_shared(), LoraSettings(rank=4, targets=targets))
    paths = {tensor.path for kind in meta.kinds for tensor in kind.adapter.tensors}
    assert paths == set(targets)


def test_the_second_table_is_host_memory_and_counted_by_itself() -> None:
    meta = meta_model(gemma4_shared())
    shape = StepShape(num_micro_batches=2, micro_batch_size=1, tokens=8)
    prediction = predict(meta, numerics=Numerics(), plan=Plan(num_slots=2), shape=shape, device_type="cpu")
    assert prediction.host["per-block table"] == 131 * 6 * 12 * 2
    assert prediction.device["per-block input modules"] == (6 * 12 * 48 + 12) * 2
    assert prediction.device["per-block inputs"] == 2 * 8 * 6 * 12 * 2
    # Keys and values of two layer types and their gradients: (16 + 32) elements each, one head.
    assert prediction.device["states shared by blocks"] == 2 * 8 * 4 * (16 + 32) * 2
    assert "per-block table" not in prediction.device


def test_an_e2b_keeps_its_large_table_off_an_8_gb_card() -> None:
    """One period of own and one of shared blocks at real sizes, counted on the meta device."""
    meta = meta_model(gemma4_real_config("gemma-4-e2b", num_blocks=10))
    shape = StepShape(num_micro_batches=4, micro_batch_size=1, tokens=512)
    prediction = predict(meta, numerics=Numerics(), plan=Plan(num_slots=2), shape=shape)
    assert prediction.host["per-block table"] == 262144 * 10 * 256 * 2
    assert [len(kind.blocks) for kind in meta.kinds] == [3, 1, 1, 4, 1]


def test_a_31b_has_two_kinds_of_blocks_and_its_full_ones_no_v_proj() -> None:
    meta = meta_model(gemma4_real_config("gemma-4-31b", num_blocks=6))
    assert [kind.blocks for kind in meta.kinds] == [(0, 1, 2, 3, 4), (5,)]
    assert [kind.head_dim for kind in meta.kinds] == [256, 512]
    assert "self_attn.v_proj" not in {tensor.path for tensor in meta.kinds[1].adapter.tensors}


def test_a_dense_model_has_none_of_these_terms() -> None:
    shape = StepShape(num_micro_batches=2, micro_batch_size=1, tokens=8)
    prediction = predict(
        meta_model(gemma4_dense()),
        numerics=Numerics(),
        plan=Plan(num_slots=2),
        shape=shape,
        device_type="cpu",
    )
    assert not [
        term for term in (*prediction.device, *prediction.host) if "per-block" in term or "shared" in term
    ]


def test_a_token_that_the_second_table_lacks_is_refused_on_the_host() -> None:
    case = next(case for case in GEMMA4_CASES if "shared" in case.name)
    run = start_case(case, Plan(num_slots=2), load_registry(), torch.device("cpu"))
    assert run.model.per_block is not None
    run.model.per_block.embedding.table = run.model.per_block.embedding.table[:100]
    ids = torch.tensor([[1, 120, 3]])
    with pytest.raises(UserError, match="ids from 0 to 99"):
        run.engine.evaluate([RandomBatch(ids, ids)])
    run.close()


def test_a_published_config_raises_no_note(tmp_path: Path) -> None:
    """Sizes of full layers are stated under names that the class does not declare, and differ between layers."""
    config = gemma4_real_config("gemma-4-e2b")
    stated = {
        **{
            key: value
            for key, value in config.to_dict().items()
            if key not in ("per_layer_config", "output_attentions")
        },
        "head_dim": 256,
        "global_head_dim": 512,
        "num_key_value_heads": 1,
        "num_global_key_value_heads": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(stated))
    loaded = load_config(tmp_path)
    architecture = Gemma4()
    effective = effective_config(loaded, architecture, architecture.parts(loaded))
    assert config_notes(stated, loaded, effective) == ()


def test_only_blocks_that_read_another_block_s_keys_may_have_their_own_in_the_files() -> None:
    config = gemma4_shared()
    first = config.num_hidden_layers - config.num_kv_shared_layers

    def ignored(model: Any, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in Gemma4().ignored(model))

    for prefix in ("model", "model.language_model", "language_model.model"):
        name = prefix + ".layers.{}.self_attn.k_proj.weight"
        assert ignored(config, name.format(first))
        assert ignored(config, name.format(config.num_hidden_layers - 1))
        assert not ignored(config, name.format(first - 1))
        assert not ignored(gemma4_dense(), name.format(first))
