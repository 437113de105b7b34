"""`poros check` and `poros train` on an architecture that Poros does not know itself."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

Command = Callable[..., subprocess.CompletedProcess[str]]

WARNING = "Architecture `llama` is asserted by distribution `poros-arch-llama`, not validated by Poros"
DISCLAIMER = "no claim of bitwise equality is made for this run"


@pytest.fixture(scope="module")
def trained(
    poros: Command, model: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """The output folder of a short run, and what it printed."""
    output = tmp_path_factory.mktemp("run") / "out"
    numbers = ("--max-steps", 4, "--set", "optimizer.learning_rate=1e-2", "--set", "micro_batches=2")
    done = poros("train", "--model", model, "--data", rows, "--output", output, "--device", "cpu", *numbers)
    assert done.returncode == 0, done.stderr
    return output, done.stdout + done.stderr


def claims(shown: str) -> list[str]:
    """Return the lines that mention bitwise equality otherwise than to deny it."""
    return [line for line in shown.splitlines() if "bitwise" in line and DISCLAIMER not in line]


def test_check_accepts_the_model_as_user_asserted(poros: Command, model: Path) -> None:
    done = poros("check", model, "--json")
    facts = json.loads(done.stdout)
    assert (done.returncode, facts["architecture"], facts["num_blocks"]) == (0, "llama", 3)
    assert (facts["status"], facts["registered_by"]) == ("user_asserted", "poros-arch-llama")
    assert f"Warning: {WARNING}" in done.stderr
    assert not claims(done.stdout + done.stderr)


def test_training_warns_and_makes_no_claim(trained: tuple[Path, str]) -> None:
    shown = trained[1]
    assert f"Warning: {WARNING}" in shown
    assert "llama (user asserted, from poros-arch-llama), 3 blocks, nf4" in shown
    assert not claims(shown)


def test_the_loss_falls(trained: tuple[Path, str]) -> None:
    result = json.loads((trained[0] / "run.json").read_text())["result"]
    assert result["last_loss"] < result["first_loss"]


def test_the_status_is_recorded_with_the_run(trained: tuple[Path, str]) -> None:
    recorded = json.loads((trained[0] / "run.json").read_text())["model"]
    assert recorded["status"] == "user_asserted"
    assert recorded["registered_by"] == "poros-arch-llama"


def test_stock_peft_reads_the_adapter(trained: tuple[Path, str], model: Path) -> None:
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        before = base(ids).logits
        adapted = PeftModel.from_pretrained(base, trained[0] / "adapter")
        after = adapted(ids).logits
    saved = load_file(trained[0] / "adapter" / "adapter_model.safetensors")
    loaded = get_peft_model_state_dict(adapted)
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert not torch.equal(before, after)
