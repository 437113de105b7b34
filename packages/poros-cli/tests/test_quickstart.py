"""`poros quickstart`: the tour on a tiny stand-in, and on the real model where its package is installed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from poros.errors import UserError
from poros.parity.compare import Verdict
from poros_cli.config_file import load_config
from poros_cli.main import run
from poros_cli.quickstart import prepare, tour

PACKAGED = Path(tour.__file__).parent
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture
def stand_in(saved_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the tiny model for the real one."""

    def copy(folder: Path) -> bool:
        shutil.copytree(saved_model, folder)
        return True

    monkeypatch.setattr(tour, "prepare_model", copy)


@pytest.mark.parametrize("name", ["quickstart.jsonl", "quickstart-held-out.jsonl", "quickstart.yaml"])
def test_the_files_in_examples_are_the_packaged_ones(name: str) -> None:
    assert (EXAMPLES / name).read_bytes() == (PACKAGED / name).read_bytes()


def test_no_held_out_question_is_trained() -> None:
    questions = [
        {json.loads(line)["messages"][0]["content"] for line in (PACKAGED / name).read_text().splitlines()}
        for name in ("quickstart.jsonl", "quickstart-held-out.jsonl")
    ]
    assert not questions[0] & questions[1]
    assert tour.QUESTION in questions[1]


def test_the_example_config_is_valid_and_names_files_that_exist() -> None:
    config = load_config(EXAMPLES / "quickstart.yaml")
    assert (EXAMPLES.parent / config.data).is_file()
    assert (EXAMPLES.parent / str(config.eval_data)).is_file()


def test_missing_distributions_are_named_with_the_command_that_brings_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(prepare, "NEEDED", {"no_such_module": "no-such-distribution"})
    with pytest.raises(UserError, match="`uv run --group quickstart poros quickstart`"):
        prepare.prepare_model(tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.usefixtures("stand_in")
def test_the_tour_shows_losses_answers_and_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["quickstart", "--output", str(tmp_path / "out"), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    found = re.search(r"Held-out loss: ([\d.]+) before, ([\d.]+) after", shown)
    assert found
    assert float(found[2]) < float(found[1])
    assert "  before: " in shown
    assert "  after:  " in shown
    assert re.search(r"Streamed against resident, \d+ tensors: equal", shown)
    assert str(tmp_path / "out" / "run" / "adapter") in shown
    assert "Peak host memory predicted" in shown


@pytest.mark.usefixtures("stand_in")
def test_a_second_tour_is_refused_without_overwrite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    assert run(["quickstart", "--output", str(tmp_path), "--device", "cpu"]) == 2
    assert "not empty" in capsys.readouterr().err


@pytest.mark.usefixtures("stand_in")
def test_a_difference_between_streamed_and_resident_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = Verdict("different", "first difference at step 0", 24)
    monkeypatch.setattr(tour, "compare_residencies", lambda *_, **__: verdict)
    assert run(["quickstart", "--output", str(tmp_path / "out"), "--device", "cpu"]) == 1
    assert "first difference at step 0" in capsys.readouterr().out


@pytest.mark.real_model
def test_the_real_model_learns_the_greeting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["quickstart", "--output", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "  before: The capital of France is Paris" in shown
    assert "  after:  Ahoy! Paris, captain." in shown
    assert "tensors: equal" in shown


@pytest.mark.real_model
def test_the_qwen2_layout_computes_what_smollm2_does(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    prepare.prepare_model(tmp_path / "model")
    gguf = prepare._find_gguf()
    llama = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    qwen = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for parameter in llama.parameters():  # not the rotary tables, which a cast of the module would round too
        parameter.data = parameter.data.to(torch.bfloat16).float()
    ids = torch.arange(100, 140)[None]
    with torch.no_grad():
        assert torch.equal(llama(ids).logits, qwen(ids).logits)
