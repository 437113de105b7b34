"""`poros.export`: merged weights against PEFT's own merge, the folder they end in, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

import poros
from poros.checkpoint import read_header
from poros.errors import CheckpointError, ConfigError, NonFiniteError, OutputError
from poros.export import MergeReport, find_adapter, merge, merging
from poros.plugins import Registry

CPU = torch.device("cpu")
IDS = (3, 9, 27, 33, 5, 8)
# bfloat16 keeps 8 bits of a significand. On a bfloat16 model PEFT rounds the delta and then the sum, Poros the sum
# alone: two roundings of half a unit each, of the sum's and the delta's size, and one of them may cross a binade.
PEFT_BF16_ULPS = 2.0
# float32 products of two blocks in another order, on logits of about 1 (measured 4e-7, CPU, 2026-11-30).
FLOAT32_LOGITS = 1e-5

MakeAdapter = Callable[..., Path]


class Row:
    """A micro-batch."""

    def __init__(self, input_ids: torch.Tensor, labels: torch.Tensor) -> None:
        self.input_ids, self.labels = input_ids, labels


class OneStep:
    """A step source of a single step."""

    num_steps, fingerprint = 1, "one"

    def step(self, index: int) -> list[Row]:
        return [Row(torch.tensor([IDS]), torch.tensor([IDS]))]


@pytest.fixture
def make_adapter(tiny_model: Path, tmp_path: Path) -> MakeAdapter:
    """Save an adapter with random values as PEFT itself does; keyword arguments are `LoraConfig`'s."""

    def make(base: Path = tiny_model, name: str = "adapter", **config: Any) -> Path:
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        defaults: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
        adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **{**defaults, **config}))
        with torch.no_grad():
            for key, parameter in adapted.named_parameters():
                if "lora_B" in key:
                    parameter.normal_(std=0.1)
        adapted.save_pretrained(tmp_path / name)
        return tmp_path / name

    return make


@pytest.fixture(scope="module")
def run_folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a one-step NF4 run."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    opened = poros.open_model(tiny_model, lora=poros.LoraSettings(rank=4))
    optimizer = poros.OptimizerSettings(learning_rate=1e-2)
    settings = poros.RunSettings(
        output=folder, device="cpu", optimizer=optimizer, plan=poros.Plan(num_slots=2)
    )
    with poros.Trainer(opened, OneStep(), settings) as trainer:
        trainer.run()
    return folder


@pytest.fixture
def merged(
    registry: Registry, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., MergeReport]:
    """Merge an adapter folder into ``tmp_path / "merged"``; the probe only runs where a test looks at it."""

    def run(adapter: Path, *, model: Path = tiny_model, probed: bool = False, **more: Any) -> MergeReport:
        if not probed:
            monkeypatch.setattr(merging, "probe_logits", lambda *_: torch.zeros(len(IDS), 1))
        arguments: dict[str, Any] = {"registry": registry, "probe": lambda _: IDS, **more}
        return merge(find_adapter(adapter), model, tmp_path / "merged", **arguments)

    return run


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}


def peft_merge(base: Path, adapter: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    return peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank pattern": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.down_proj": 32}},
    "pattern and rslora": {"rank_pattern": {r"layers\.0\..*q_proj": 3}, "use_rslora": True},
    "regular expression": {"target_modules": r".*\.0\.self_attn\.(q|v)_proj|.*\.1\.mlp\.up_proj"},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_merged_weights_are_those_of_peft_in_float32_rounded_once(
    make_adapter: MakeAdapter, merged: Any, tiny_model: Path, config: dict[str, Any]
) -> None:
    adapter = make_adapter(**config)
    report = merged(adapter)
    expected = peft_merge(tiny_model, adapter, torch.float32)
    found = tensors(report.folder)
    assert set(found) == {name for name in expected if name in tensors(tiny_model)}
    for name, tensor in found.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, expected[name].to(torch.bfloat16)), name


def test_merged_weights_are_near_those_of_peft_in_bfloat16(
    make_adapter: MakeAdapter, merged: Any, tiny_model: Path
) -> None:
    adapter = make_adapter()
    found = tensors(merged(adapter).folder)
    for name, expected in peft_merge(tiny_model, adapter, torch.bfloat16).items():
        difference = (found[name].float() - expected.float()).abs() if name in found else torch.zeros(1)
        unit = expected.float().abs().amax() * torch.finfo(torch.bfloat16).eps
        assert difference.max() <= PEFT_BF16_ULPS * unit, name


def test_stock_transformers_loads_the_folder_without_a_missing_key(
    make_adapter: MakeAdapter, merged: Any, tiny_model: Path
) -> None:
    adapter = make_adapter()
    report = merged(adapter, probed=True)
    model, info = AutoModelForCausalLM.from_pretrained(
        report.folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(base, adapter)(torch.tensor([IDS])).logits
        found = model(torch.tensor([IDS])).logits
    difference = float((found - expected).abs().max())
    (stated,) = report.differences
    assert 0 < difference < 2 * stated.largest + FLOAT32_LOGITS


def test_an_adapter_of_zeros_merges_to_the_base_and_differs_nowhere(
    make_adapter: MakeAdapter, merged: Any, tiny_model: Path
) -> None:
    adapter = make_adapter()
    path = adapter / "adapter_model.safetensors"
    save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(path).items()}, path)
    report = merged(adapter, probed=True)
    base, found = tensors(tiny_model), tensors(report.folder)
    assert all(torch.equal(found[name], base[name]) for name in found)
    (difference,) = report.differences
    assert difference.largest == 0
    assert difference.same_choice == difference.positions == len(IDS)


def test_small_shards_come_with_an_index_and_equal_one_file(
    make_adapter: MakeAdapter, merged: Any, tmp_path: Path
) -> None:
    adapter = make_adapter()
    whole = tensors(merged(adapter).folder)
    shutil.rmtree(tmp_path / "merged")
    report = merged(adapter, shard_bytes=4000)
    assert len(report.files) > 3
    index = json.loads((report.folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.num_bytes
    assert set(index["weight_map"].values()) == set(report.files)
    for file_name in report.files:
        header = read_header(report.folder / file_name)
        assert len(header.tensors) == 1 or header.num_bytes - 8 < 8000
    parts = tensors(report.folder)
    assert set(parts) == set(whole)
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def _save(folder: Path, dtype: torch.dtype = torch.bfloat16, **config: Any) -> Path:
    torch.manual_seed(1)
    sizes = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    Qwen2ForCausalLM(Qwen2Config(**{**sizes, **heads, **config})).to(dtype).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_written_once_and_says_whether_it_is_tied(
    make_adapter: MakeAdapter, merged: Any, tmp_path: Path, tied: bool
) -> None:
    base = _save(tmp_path / "base", tie_word_embeddings=tied)
    report = merged(make_adapter(base), model=base)
    assert ("lm_head.weight" in tensors(report.folder)) is not tied
    assert json.loads((report.folder / "config.json").read_text())["tie_word_embeddings"] is tied
    model = AutoModelForCausalLM.from_pretrained(report.folder)
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) is tied


def test_a_float32_base_is_rounded_once_and_that_is_said(
    make_adapter: MakeAdapter, merged: Any, tmp_path: Path
) -> None:
    base = _save(tmp_path / "base", torch.float32)
    adapter = make_adapter(base)
    report = merged(adapter, model=base, probed=True)
    expected = peft_merge(base, adapter, torch.float32)
    assert all(torch.equal(t, expected[n].to(torch.bfloat16)) for n, t in tensors(report.folder).items())
    assert any("in torch.float32" in note for note in report.notes)
    assert json.loads((report.folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_dequantized_merges_onto_what_training_multiplied_with(
    make_adapter: MakeAdapter, merged: Any, tiny_model: Path, registry: Registry
) -> None:
    from poros.export.fitting import open_with_adapter
    from poros.export.weights import merge_pair

    adapter = make_adapter()
    report = merged(adapter, base="dequantized", quantization="nf4", probed=True)
    found = tensors(report.folder)
    opened = open_with_adapter(
        tiny_model, find_adapter(adapter), quantization="nf4", numerics=poros.Numerics(), registry=registry
    )
    engine = opened.model.load(plan=poros.Plan(num_slots=2), device=CPU, seed=0)
    opened.fill(engine.model)
    engine.evaluate([Row(torch.tensor([IDS]), torch.full((1, len(IDS)), -100))])
    bound = {
        f"model.layers.{block}.{path}.weight": linear.dequantize()
        for block in range(2)
        for template in engine._templates
        if engine.slots is not None and engine.slots.contents[block] == block
        for path, linear in template._linears
        if template._buffer.data_ptr() == engine.slots.buffers[block].data_ptr()
    }
    assert bound
    for name, weight in bound.items():
        _, _, _, block, path = (
            name.removesuffix(".weight").split(".", 4) if False else (0, 0, 0, *_place(name))
        )
        pair = opened.pairs.get((block, path))
        expected = weight if pair is None else merge_pair(weight, pair).to(torch.bfloat16)
        assert torch.equal(found[name], expected), name
    (difference,) = report.differences
    assert difference.reference == "the nf4 base that was trained + adapter"


def _place(name: str) -> tuple[int, str]:
    index, _, path = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
    return int(index), path


def test_a_run_folder_is_an_adapter_that_knows_its_format(merged: Any, run_folder: Path) -> None:
    report = merged(run_folder, probed=True)
    assert [d.reference for d in report.differences] == [
        "the original base + adapter",
        "the nf4 base that was trained + adapter",
    ]
    rounding, quantization = report.differences
    assert 0 < rounding.largest < quantization.largest
    assert report.notes == ()


def test_peak_memory_is_a_shard_and_little_more(
    make_adapter: MakeAdapter, merged: Any, tmp_path: Path
) -> None:
    base = _save(tmp_path / "base", num_hidden_layers=6, hidden_size=64, intermediate_size=256)
    adapter = make_adapter(base)
    shard_bytes = 120_000
    num_bytes = sum(t.nbytes for t in tensors(base).values())
    largest = max(t.nbytes for t in tensors(base).values())
    alive, peak = 0, 0
    load, save = merging.MergedWeights.load, merging.save_tensors

    def counted_load(self: Any, name: str) -> torch.Tensor:
        nonlocal alive, peak
        tensor = load(self, name)
        alive += tensor.nbytes
        peak = max(peak, alive)
        return tensor

    def counted_save(path: Path, shard: dict[str, torch.Tensor], *more: Any) -> None:
        nonlocal alive
        save(path, shard, *more)
        alive -= sum(tensor.nbytes for tensor in shard.values())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging.MergedWeights, "load", counted_load)
        patch.setattr(merging, "save_tensors", counted_save)
        merged(adapter, model=base, shard_bytes=shard_bytes)
    assert num_bytes > 5 * shard_bytes
    assert peak <= shard_bytes + largest


@pytest.mark.parametrize("content", ["file", "folder"])
def test_a_used_output_is_refused_and_stays(
    make_adapter: MakeAdapter, merged: Any, tmp_path: Path, content: str
) -> None:
    adapter = make_adapter()
    used = tmp_path / "merged" / "mine" if content == "folder" else tmp_path / "merged"
    used.parent.mkdir(exist_ok=True)
    used.write_text("precious")
    with pytest.raises(OutputError, match="a merge never replaces one"):
        merged(adapter)
    assert used.read_text() == "precious"


def test_an_empty_output_folder_is_filled(make_adapter: MakeAdapter, merged: Any, tmp_path: Path) -> None:
    (tmp_path / "merged").mkdir()
    assert (merged(make_adapter()).folder / "config.json").is_file()


def test_a_full_disk_leaves_nothing_behind(
    make_adapter: MakeAdapter, merged: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    adapter = make_adapter()
    before = sorted(tmp_path.iterdir())
    save, calls = merging.save_tensors, []

    def full(path: Path, *arguments: Any) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(path, *arguments)

    monkeypatch.setattr(merging, "save_tensors", full)
    with pytest.raises(OutputError, match="No space left on device"):
        merged(adapter, shard_bytes=4000)
    assert sorted(tmp_path.iterdir()) == before


def test_too_little_space_is_found_before_anything_is_written(
    make_adapter: MakeAdapter, merged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make_adapter()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 0, 10))  # type: ignore[attr-defined]
    with pytest.raises(OutputError, match="Not enough disk space for the merged weights"):
        merged(adapter)


def test_a_merge_that_overflows_is_no_result(make_adapter: MakeAdapter, merged: Any, tmp_path: Path) -> None:
    adapter = make_adapter()
    path = adapter / "adapter_model.safetensors"
    save_file({name: torch.full_like(tensor, 1e25) for name, tensor in load_file(path).items()}, path)
    with pytest.raises(NonFiniteError, match="The merged model is not saved"):
        merged(adapter)
    assert not (tmp_path / "merged").exists()


def test_a_four_bit_base_is_not_merged_into(make_adapter: MakeAdapter, merged: Any) -> None:
    with pytest.raises(ConfigError, match="A merge into 4-bit weights is not offered"):
        merged(make_adapter(), base="nf4")


def test_a_quantized_base_is_refused(make_adapter: MakeAdapter, merged: Any, tmp_path: Path) -> None:
    adapter, base = make_adapter(), _save(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="quantized with bitsandbytes, 4 bits"):
        merged(adapter, model=base)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"hidden_size": 32}, "a tensor does not fit: expected 32 in and 32 out features"),
        ({"num_hidden_layers": 1}, r"a layer is not in this one.*layers\.1"),
    ],
)
def test_an_adapter_of_another_base_is_refused(
    make_adapter: MakeAdapter, merged: Any, tmp_path: Path, config: dict[str, Any], what: str
) -> None:
    adapter = make_adapter(_save(tmp_path / "small"), target_modules=["q_proj"])
    with pytest.raises(CheckpointError, match=what):
        merged(adapter, model=_save(tmp_path / "base", **config))


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    ],
)
def test_more_than_lora_is_refused_by_name(
    make_adapter: MakeAdapter, merged: Any, config: dict[str, Any], field: str
) -> None:
    adapter = make_adapter()
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    with pytest.raises(ConfigError, match=f"expected `{field}` to be"):
        merged(adapter)


def test_an_adapter_on_the_head_is_refused_by_name(make_adapter: MakeAdapter, merged: Any) -> None:
    adapter = make_adapter()
    path = adapter / "adapter_model.safetensors"
    module = "model.layers.0.self_attn.q_proj"
    save_file({n.replace(module, "lm_head"): t for n, t in load_file(path).items()}, path)
    with pytest.raises(ConfigError, match=r"vocabulary matrices is not offered.*lm_head"):
        merged(adapter)


def test_a_rank_that_the_config_does_not_say_is_refused(make_adapter: MakeAdapter, merged: Any) -> None:
    adapter = make_adapter()
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "r": 8}))
    with pytest.raises(CheckpointError, match="expected rank 8, got rank 4"):
        merged(adapter)


def test_a_run_without_an_adapter_names_resume(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"`poros train \.\.\. --resume`"):
        find_adapter(tmp_path)


def test_a_folder_that_is_no_adapter_says_what_one_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected the output folder of a run"):
        find_adapter(tmp_path)


def test_other_weight_files_than_the_runs_are_noted(
    merged: Any, tmp_path: Path, run_folder: Path, tiny_model: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(2)
    model.save_pretrained(tmp_path / "other")
    report = merged(run_folder, model=tmp_path / "other")
    assert any("read other weight files" in note for note in report.notes)


def test_tokenizer_and_generation_files_come_along(
    make_adapter: MakeAdapter, merged: Any, tmp_path: Path
) -> None:
    base = _save(tmp_path / "base")
    adapter = make_adapter(base)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE"):
        (base / name).write_text(f"{{}} {name}")
    (base / "preprocessor_config.json").write_text("{}")
    (base / "modeling_evil.py").write_text("raise SystemExit")
    report = merged(adapter, model=base)
    copied = ("LICENSE", "chat_template.jinja", "generation_config.json", "tokenizer.json")
    assert report.companions == (*copied, "tokenizer_config.json")
    assert (report.folder / "tokenizer.json").read_text() == "{} tokenizer.json"


def test_keys_of_the_bases_own_config_file_are_kept(
    make_adapter: MakeAdapter, merged: Any, tmp_path: Path
) -> None:
    base = _save(tmp_path / "base")
    adapter = make_adapter(base)
    config = json.loads((base / "config.json").read_text())
    config.pop("dtype")
    config.update(torch_dtype="float16", rope_theta=12345.0)
    config.pop("rope_parameters", None)
    (base / "config.json").write_text(json.dumps(config))
    merged(adapter, model=base)
    written = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert written == {**config, "torch_dtype": "bfloat16", "tie_word_embeddings": False}
