"""`lora.init_from`: an adapter's weights are the start of a run, and what does not fit is refused with both values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import poros
from poros.checkpoint.adapter_paths import move_adapter
from poros.errors import CheckpointError, ConfigError, NonFiniteError

CPU = torch.device("cpu")
WEIGHTS = "adapter_model.safetensors"
PLAN = poros.Plan(num_slots=2)

MakeAdapter = Callable[..., Path]
MakeTrainer = Callable[..., poros.Trainer]


@pytest.fixture
def make_adapter(tiny_model: Path, tmp_path: Path) -> MakeAdapter:
    """Save an adapter with random values as PEFT itself does; keyword arguments are `LoraConfig`'s."""

    def make(name: str = "start", dtype: torch.dtype = torch.float32, **config: Any) -> Path:
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        defaults: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
        adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **{**defaults, **config}))
        with torch.no_grad():
            for key, parameter in adapted.named_parameters():
                if "lora_B" in key:
                    parameter.normal_(std=0.1)
                if "lora_" in key:
                    parameter.data = parameter.data.to(dtype)
        adapted.save_pretrained(tmp_path / name)
        return tmp_path / name

    return make


def lora(folder: Path | None, **changes: Any) -> poros.LoraSettings:
    usual = {"rank": 4, "alpha": 8, "targets": ("q_proj", "down_proj"), **changes}
    return poros.LoraSettings(init_from=None if folder is None else str(folder), **usual)


def started(model: Path, settings: poros.LoraSettings) -> dict[str, torch.Tensor]:
    """Return the bank's tensors by PEFT's key before the first step."""
    engine = poros.open_model(model, lora=settings).load(plan=PLAN, device=CPU, seed=0)
    found = {name: tensor.clone() for name, tensor in engine.model.adapter_tensors().items()}
    engine.close()
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name].float()) for name in a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_starts_from_the_bits_that_peft_saved(
    make_adapter: MakeAdapter, tiny_model: Path, dtype: torch.dtype
) -> None:
    folder = make_adapter(dtype=dtype)
    assert same(started(tiny_model, lora(folder)), load_file(folder / WEIGHTS))
    assert not same(started(tiny_model, lora(None)), load_file(folder / WEIGHTS))


def test_ranks_alphas_and_scaling_may_be_those_of_patterns(
    make_adapter: MakeAdapter, tiny_model: Path
) -> None:
    patterns = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}, "use_rslora": True}
    folder = make_adapter(**patterns)
    assert same(started(tiny_model, lora(folder, **patterns)), load_file(folder / WEIGHTS))


@pytest.mark.parametrize("blocks", ["model.language_model.layers", "language_model.model.layers"])
def test_keys_of_a_wrapper_class_are_read(
    make_adapter: MakeAdapter, tiny_model: Path, tmp_path: Path, blocks: str
) -> None:
    folder = make_adapter()
    moved = move_adapter(folder, tmp_path / "moved", old="model.layers", new=blocks)
    assert same(started(tiny_model, lora(moved)), load_file(folder / WEIGHTS))


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        ({"r": 8}, {}, r"expected rank 4, got rank 8 .*lora\.rank: 8"),
        ({"lora_alpha": 16}, {}, r"expected alpha 8, got alpha 16 .*`lora\.alpha: 16`"),
        ({"use_rslora": True}, {}, r"expected use_rslora False, got use_rslora True .*use_rslora: true"),
        ({"r": 8, "lora_alpha": 16}, {}, r"expected rank 4, alpha 8, got rank 8, alpha 16"),
        ({"rank_pattern": {r"layers\.1\..*q_proj": 2}}, {}, r"got rank 2 \(.*block 1, `self_attn.q_proj`\)"),
        ({}, {"targets": ("q_proj",)}, r"expected q_proj in blocks 0-1, got down_proj, q_proj in blocks 0-1"),
        ({"layers_to_transform": [1]}, {}, r"in blocks 0-1, got .* in blocks 1 \(.*block 0, `mlp.down_proj`"),
    ],
)
def test_another_kind_of_adapter_is_refused_with_both_values(
    make_adapter: MakeAdapter, tiny_model: Path, theirs: dict[str, Any], ours: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        poros.open_model(tiny_model, lora=lora(make_adapter(**theirs), **ours))


def test_what_is_more_than_lora_is_refused_by_name(make_adapter: MakeAdapter, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="expected `use_dora` to be False, got True"):
        poros.open_model(tiny_model, lora=lora(make_adapter(use_dora=True)))


def test_an_adapter_on_the_head_is_refused(make_adapter: MakeAdapter, tiny_model: Path) -> None:
    folder = make_adapter()
    head = {f"base_model.model.lm_head.lora_{side}.weight": torch.ones(32, 32) for side in "AB"}
    save_file({**load_file(folder / WEIGHTS), **head}, folder / WEIGHTS)
    with pytest.raises(ConfigError, match=r"vocabulary matrices is not offered: .* got `lm_head`"):
        poros.open_model(tiny_model, lora=lora(folder))


def test_an_adapter_of_another_base_is_refused(make_adapter: MakeAdapter, tiny_model: Path) -> None:
    folder = make_adapter()
    tensors = load_file(folder / WEIGHTS)
    save_file(
        {k: t[:, :-1].contiguous() if "lora_A" in k else t for k, t in tensors.items()}, folder / WEIGHTS
    )
    with pytest.raises(CheckpointError, match="belongs to another base: a tensor does not fit"):
        poros.open_model(tiny_model, lora=lora(folder))


def test_a_start_that_is_not_finite_is_refused(make_adapter: MakeAdapter, tiny_model: Path) -> None:
    folder = make_adapter()
    tensors = load_file(folder / WEIGHTS)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(NonFiniteError, match="The adapter to start from"):
        poros.open_model(tiny_model, lora=lora(folder))


def test_a_folder_that_does_not_exist_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"Cannot read an adapter: .* got no such folder"):
        poros.open_model(tiny_model, lora=lora(tmp_path / "nowhere"))


def test_the_adapter_of_a_run_starts_the_next_and_no_plan_changes_a_bit(
    make_trainer: MakeTrainer, make_steps: Any, tiny_model: Path, tmp_path: Path
) -> None:
    steps = make_steps(epochs=1)
    with make_trainer(tmp_path / "first", steps=steps, plan=PLAN, lora=lora(None)) as trainer:
        first = trainer.run()
    assert first.adapter is not None
    trained = load_file(first.adapter / WEIGHTS)
    assert same(started(tiny_model, lora(tmp_path / "first")), trained)
    ends = []
    for name, plan in (("streamed", PLAN), ("resident", poros.Plan(residency="resident"))):
        settings = {"steps": steps, "plan": plan, "lora": lora(first.adapter)}
        with make_trainer(tmp_path / name, **settings) as trainer:
            assert any("starts from the adapter" in note for note in trainer.notes)
            result = trainer.run()
        assert result.first_loss != first.first_loss
        assert result.adapter is not None
        ends.append(load_file(result.adapter / WEIGHTS))
    assert same(*ends)
    assert not same(ends[0], trained)


def test_the_drop_in_module_starts_from_it_too(make_adapter: MakeAdapter, tiny_model: Path) -> None:
    folder = make_adapter()
    module = poros.streamed_model(tiny_model, lora=lora(folder), plan=PLAN, device="cpu")
    found = {
        name.replace(".default.", "."): parameter.detach()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    assert same(found, load_file(folder / WEIGHTS))
    module.close()


def test_a_resume_with_another_start_is_refused_and_a_moved_folder_is_not(
    make_adapter: MakeAdapter, make_trainer: MakeTrainer, make_steps: Any, tmp_path: Path
) -> None:
    folder = make_adapter()
    usual = {"steps": make_steps(epochs=1), "plan": PLAN}
    with make_trainer(tmp_path / "run", lora=lora(folder), **usual) as trainer:
        trainer.run()
    moved = folder.rename(tmp_path / "moved")
    with make_trainer(tmp_path / "run", lora=lora(moved), resume=True, **usual) as trainer:
        assert not any("changed settings" in note for note in trainer.notes)
    with pytest.raises(ConfigError, match=r"lora\.init_from: [0-9a-f]{32} -> None"):
        make_trainer(tmp_path / "run", lora=lora(None), resume=True, **usual)
    tensors = load_file(moved / WEIGHTS)
    next(iter(tensors.values()))[0, 0] += 1
    save_file(tensors, moved / WEIGHTS)
    with pytest.raises(ConfigError, match=r"lora\.init_from: [0-9a-f]{32} -> [0-9a-f]{32}"):
        make_trainer(tmp_path / "run", lora=lora(moved), resume=True, **usual)
