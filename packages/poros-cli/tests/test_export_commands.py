"""`poros merge` and `poros generate` on a tiny checkpoint and a run's adapter."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from poros.checkpoint import resolve_model
from poros_cli.main import run

PROMPT = "Say 3"
FLOAT32 = ("--set", "numerics.compute_dtype=float32", "--quantization", "bf16_bitwise")


@pytest.fixture(scope="module")
def trained(saved_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a short run in float32 on the checkpoint's own weights."""
    folder = tmp_path_factory.mktemp("trained")
    rows = folder / "rows.jsonl"
    rows.write_text('{"instruction": "Say 3", "output": "Number 3."}\n' * 4)
    files = ("--model", str(saved_model), "--data", str(rows), "--output", str(folder / "run"))
    more = ("--device", "cpu", "--max-steps", "3", "--learning-rate", "0.05")
    assert run(["train", *files, *more, *FLOAT32]) == 0
    return folder / "run"


def stock_answer(base: Path, adapter: Path, text: str, num_tokens: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(base)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, adapter).eval()
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**ids, max_new_tokens=num_tokens, do_sample=False)
    return str(tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


def test_a_run_is_merged_onto_the_base_that_it_names(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "merged"
    assert (
        run(["merge", str(trained), "--output", str(output), "--shard-size", "20KB", "--device", "cpu"]) == 0
    )
    shown = capsys.readouterr().out
    assert f"Merged: {output} (Qwen2ForCausalLM, bfloat16, " in shown
    assert "14 linear layers changed" in shown
    assert "Largest logit difference to the original base + adapter: " in shown
    assert "EXPERIMENTAL" not in shown
    _, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not info["missing_keys"]
    assert AutoTokenizer.from_pretrained(output).chat_template
    assert resolve_model(str(output)) == output


def test_merging_twice_into_one_folder_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("precious")
    assert run(["merge", str(trained), "--output", str(tmp_path)]) == 2
    assert "a merge never replaces one" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "precious"


def test_no_base_is_named_by_a_flag_or_by_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--device", "cpu", "text"]) == 2
    assert "No base model: expected `--model DIR`" in capsys.readouterr().err


def test_an_answer_is_that_of_stock_transformers_and_peft(
    trained: Path, saved_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--adapter", str(trained), "--device", "cpu", "--max-new-tokens", "8"]
    assert run(["generate", *arguments, PROMPT]) == 0
    shown = capsys.readouterr()
    assert shown.out.rstrip("\n") == stock_answer(saved_model, trained / "adapter", PROMPT, 8).rstrip("\n")
    assert "`--chat` makes PROMPT a user's message" in shown.err
    assert "14 adapted layers of " in shown.err
    assert "tokens/s after the first" in shown.err


def test_chat_renders_the_template_and_a_conversation_goes_on(
    trained: Path, saved_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["generate", "--adapter", str(trained), "--device", "cpu", "--max-new-tokens", "6", "--chat"]
    tokenizer = AutoTokenizer.from_pretrained(saved_model)

    def expected(messages: list[dict[str, str]]) -> str:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return stock_answer(saved_model, trained / "adapter", text, 6)

    first = expected([{"role": "user", "content": "Say 3"}])
    assert run([*arguments, PROMPT]) == 0
    assert capsys.readouterr().out == first + "\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("Say 3\n\nAgain\n"))
    assert run(arguments) == 0
    turns = [
        {"role": "user", "content": "Say 3"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Again"},
    ]
    assert capsys.readouterr().out == f"{first}\n{expected(turns)}\n"


def test_a_seed_draws_the_same_answer_and_another_seed_another(
    saved_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for seed in ("1", "1", "2"):
        draw = ["--temperature", "2", "--top-p", "0.9", "--seed", seed, "--max-new-tokens", "12"]
        assert run(["generate", "--model", str(saved_model), "--device", "cpu", *draw, PROMPT]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]


def test_a_missing_prompt_names_both_ways(saved_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--model", str(saved_model)]) == 2
    assert "give a text, or `--chat`" in capsys.readouterr().err


def test_chat_without_a_template_is_refused_before_weights_are_read(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "chat_template.jinja").unlink()
    assert run(["generate", "--model", str(model), "--device", "cpu", "--chat", "hi"]) == 2
    shown = capsys.readouterr().err
    assert "Cannot chat with this model: expected a chat template" in shown
    assert "Plan:" not in shown
