"""`poros data preview`, and case 31: whether the model will stop where its rows end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from poros_cli.data_preview import row_text
from poros_cli.main import run
from poros_cli.stop_token import stop_token_warnings
from poros_cli.tokenizer import load_tokenizer
from poros_data import load_dataset

CHAT = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
LONG = {"text": "w " * 900}


@pytest.fixture
def preview(capsys: pytest.CaptureFixture[str]) -> object:
    def call(*arguments: object, code: int = 0) -> str:
        assert run(["data", "preview", *map(str, arguments)]) == code
        captured = capsys.readouterr()
        return captured.out + captured.err

    return call


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    lines = [CHAT, LONG, {"messages": CHAT["messages"][:1]}, CHAT]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def weights(folder: Path, *, rows: int = 300, change: dict[int, torch.Tensor] | None = None) -> None:
    table = torch.randn(rows, 16, generator=torch.Generator().manual_seed(0))
    for index, row in (change or {}).items():
        table[index] = row
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    save_file({"model.embed_tokens.weight": table.to(torch.bfloat16)}, folder / "model.safetensors")


def test_rows_are_shown_with_their_supervised_text_between_markers(preview, chats, saved_model):
    shown = preview(chats, "--model", saved_model, "--max-length", 256)
    assert "chats.jsonl: 2 of 4 rows used (3 messages, 1 text)" in shown
    assert "dropped 1 rows: longer than max_length 256 (first: line 2)" in shown
    assert "dropped 1 rows: no supervised token (first: line 3)" in shown
    assert "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n[[4<|im_end|>]]" in shown
    assert "chats.jsonl:4)" in shown
    assert "2 supervised" in shown
    assert "The last supervised token of row 0 is '<|im_end|>'" in shown
    assert ", a stop token." in shown


def test_a_last_token_that_stops_nothing_is_not_called_a_stop_token(preview, chats, model):
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    shown = preview(chats, "--model", model)
    assert "a stop token." not in shown
    assert "where generation does not stop: see above." in shown


def test_lengths_are_a_histogram_that_marks_what_is_too_long(preview, chats, saved_model):
    lines = preview(chats, "--model", saved_model, "--max-length", 256).splitlines()
    (longest,) = [line for line in lines if "longer than max_length" in line and "#" in line]
    assert longest.split()[:3] == ["1025", "..", "2048"]


def test_the_settings_of_a_run_are_used(preview, chats, saved_model, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {saved_model}\ndata: {{{chats}: 0.5}}\noutput: unused\nmax_length: 256\nrows: {{truncation: split}}\n"
    )
    shown = preview(config, "--rows", 1)
    assert "weight 0.5" in shown
    assert "split 1 rows into pieces" in shown
    assert shown.count("supervised\n") == 1
    assert "split 1 rows" not in preview(config, "--truncation", "drop")
    assert not (tmp_path / "unused").exists()


def test_several_files_are_previewed_together(preview, chats, saved_model, tmp_path):
    shutil.copy(chats, tmp_path / "more.jsonl")
    shown = preview(chats, tmp_path / "more.jsonl", "--model", saved_model)
    assert "chats.jsonl: 2 of 4" in shown
    assert "more.jsonl: 2 of 4" in shown


def test_bad_input_exits_2_with_one_message(preview, chats, saved_model, tmp_path):
    assert "Missing option '--model'" in preview(chats, code=2)
    (tmp_path / "bad.jsonl").write_text('{"TEXT": "a"}\n')
    assert "rename `TEXT` to `text`" in preview(tmp_path / "bad.jsonl", "--model", saved_model, code=2)
    gone = preview(chats, "--model", saved_model, "--template", tmp_path / "none.jinja", code=2)
    assert "Cannot read the chat template" in gone


def test_colour_highlights_supervised_text(chats, saved_model):
    tokenizer = load_tokenizer(saved_model)
    row = load_dataset(chats, tokenizer, max_length=256).rows[0]
    text = row_text(tokenizer, row, coloured=True)
    assert "[[" not in text.plain
    assert [text.plain[span.start : span.end] for span in text.spans if span.style == "bold green"] == [
        "4<|im_end|>"
    ]


def test_a_long_stretch_is_shown_by_its_ends(saved_model, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"text": "begin " + "w " * 2000 + "end"}))
    tokenizer = load_tokenizer(saved_model)
    row = load_dataset(path, tokenizer, max_length=9000).rows[0]
    text = row_text(tokenizer, row, coloured=False).plain
    assert "characters)..." in text
    assert text.startswith("b[[egin w")
    assert text.endswith("end<|im_end|>]]")
    assert len(text) < 900


def end_token(folder: Path) -> tuple[object, int]:
    tokenizer = load_tokenizer(folder)
    return tokenizer, tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_a_model_that_stops_elsewhere_is_warned_about_with_its_own_end(model):
    tokenizer, end = end_token(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": 0}))
    (model / "generation_config.json").unlink(missing_ok=True)
    own = tokenizer.convert_ids_to_tokens(0)
    (warning,) = stop_token_warnings(model, tokenizer, end)
    assert f"the rows end with `<|im_end|>` ({end}), but the model's own files stop at `{own}`" in warning


def test_the_generation_config_comes_before_the_config(model):
    tokenizer, end = end_token(model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, end]}))
    (model / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert list(stop_token_warnings(model, tokenizer, end)) == []


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (torch.zeros(16), "its embedding row is zero"),
        (torch.full((16,), 1e-6), "its embedding row has the norm 3.99e-06 where others have about"),
        (torch.full((16,), 1e4), "its embedding row has the norm 3.99e+04"),
    ],
)
def test_an_end_token_that_looks_untrained_is_warned_about(model, row, said):
    tokenizer, end = end_token(model)
    weights(model, change={end: row})
    (warning,) = stop_token_warnings(model, tokenizer, end)
    assert said in warning
    assert "the model may never stop" in warning


def test_an_end_token_that_still_has_the_row_of_unused_ones_is_warned_about(model):
    tokenizer, end = end_token(model)
    weights(model, change={index: torch.arange(16.0) for index in (end, 290, 291, 292)})
    (warning,) = stop_token_warnings(model, tokenizer, end)
    assert "its embedding row is that of 3 other special or unused tokens" in warning


def test_a_trained_end_token_is_not_warned_about(model, saved_model):
    tokenizer, end = end_token(model)
    assert list(stop_token_warnings(saved_model, tokenizer, end)) == []
    weights(model)
    assert list(stop_token_warnings(model, tokenizer, end)) == []


def test_without_weights_nothing_is_said_about_the_embedding(model):
    tokenizer, end = end_token(model)
    for path in model.glob("model*.safetensors"):
        path.write_bytes(b"broken")
    assert list(stop_token_warnings(model, tokenizer, end)) == []
