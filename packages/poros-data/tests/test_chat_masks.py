"""Cases 1, 2, 14 and 15 and their kinds: what is supervised in a rendered conversation."""

from __future__ import annotations

import pytest
from tokenizers import pre_tokenizers, processors

from poros_data.encode import Encoder
from poros_data.errors import DataError
from poros_data.formats import ChatExample, TextExample
from poros_data.markers import find_markers

USER = {"role": "user", "content": "2+2?"}
REPLY = {"role": "assistant", "content": "4"}


def encode(tokenizer, example):
    return Encoder(tokenizer).encode([("f.jsonl:3", example)])[0]


def chat(tokenizer, *messages):
    return encode(tokenizer, ChatExample(list(messages)))


def said(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def test_the_answer_and_its_terminator_are_supervised_and_nothing_else(tokenizer, supervised):
    assert supervised(tokenizer, chat(tokenizer, USER, REPLY)) == ["4<|im_end|>"]


def test_every_assistant_turn_is_supervised(tokenizer, supervised):
    row = chat(tokenizer, *said("x", "y", "z", "what is\nthe capital?"))
    assert supervised(tokenizer, row) == ["y<|im_end|>", "what is\nthe capital?<|im_end|>"]


def test_the_ids_are_those_of_the_template(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, *said("x", "\n\ny", "z", "fox \U0001f98a!")]
    expected = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert list(chat(tokenizer, *messages).input_ids) == expected


def test_the_system_turn_is_kept(tokenizer):
    row = chat(tokenizer, {"role": "system", "content": "Be brief."}, USER, REPLY)
    assert "Be brief." in tokenizer.decode(row.input_ids)
    assert row.lost_roles == ()


@pytest.mark.parametrize("content", ["\n\n4", " 4 ", "\U0001f98a", "e\u0301", "assistant\n", ""])
def test_no_character_of_the_answer_is_left_out(tokenizer, supervised, content):
    (stretch,) = supervised(tokenizer, chat(tokenizer, USER, {"role": "assistant", "content": content}))
    assert stretch.endswith(content + "<|im_end|>")
    assert stretch.removesuffix(content + "<|im_end|>").strip() == ""


def test_a_user_turn_that_quotes_the_answer_is_not_supervised(tokenizer, supervised):
    row = chat(tokenizer, *said("is it 4? 4<|im_end|>", "4"))
    assert supervised(tokenizer, row) == ["4<|im_end|>"]


def test_consecutive_assistant_turns_are_both_supervised(tokenizer, supervised):
    row = chat(tokenizer, USER, REPLY, {"role": "assistant", "content": "x"})
    assert supervised(tokenizer, row) == ["4<|im_end|>", "x<|im_end|>"]


def test_a_conversation_without_assistant_has_no_supervised_token(tokenizer, supervised):
    assert supervised(tokenizer, chat(tokenizer, USER)) == []


def test_offsets_that_leave_white_space_out_lose_no_token(make_tokenizer, supervised):
    trimming = make_tokenizer()
    trimming.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trimming.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    row = chat(trimming, *said("x", "  y \n\n "))
    assert supervised(trimming, row) == ["  y \n\n <|im_end|>"]


def test_an_empty_think_block_of_the_template_is_context(thinking_tokenizer, supervised):
    row = chat(thinking_tokenizer, USER, REPLY)
    assert "<think>\n\n</think>\n\n4" in thinking_tokenizer.decode(row.input_ids)
    assert supervised(thinking_tokenizer, row) == ["4<|im_end|>"]
    assert row.lost_roles == ()


def test_reasoning_of_the_last_turn_is_supervised(thinking_tokenizer, supervised):
    row = chat(thinking_tokenizer, USER, {**REPLY, "reasoning_content": "easy"})
    assert supervised(thinking_tokenizer, row) == ["<think>\neasy\n</think>\n\n4<|im_end|>"]
    assert row.lost_roles == ()


def test_reasoning_that_the_template_drops_is_reported_and_the_rest_is_supervised(
    thinking_tokenizer, supervised
):
    row = chat(thinking_tokenizer, *said("1?", "<think>A</think>x", "2?", "B\n</think>\n\ny"))
    assert supervised(thinking_tokenizer, row) == ["x<|im_end|>", "<think>\nB\n</think>\n\ny<|im_end|>"]
    assert row.lost_roles == ("assistant",)


def test_reasoning_content_that_a_template_ignores_is_reported(tokenizer):
    assert chat(tokenizer, USER, {**REPLY, "reasoning_content": "easy"}).lost_roles == ("assistant",)


def test_a_role_that_a_template_ignores_is_reported(make_tokenizer):
    deaf = make_tokenizer(
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert chat(deaf, {"role": "system", "content": "Be brief."}, USER, REPLY).lost_roles == ("system",)


@pytest.mark.parametrize(
    ("messages", "marker"),
    [
        (said("<|im_start|>assistant\nno", "4"), "'<|im_start|>assistant\\\\n'"),
        (said("2+2?", "4<|im_end|>\n5"), "'<|im_end|>'"),
    ],
)
def test_text_that_holds_the_turn_markers_is_refused_with_its_line(tokenizer, messages, marker):
    with pytest.raises(DataError, match=r"f.jsonl:3: Turn \d .* holds the chat template's own turn marker"):
        chat(tokenizer, *messages)


def test_a_template_that_raises_is_reported_in_its_own_words_with_the_line(make_tokenizer):
    strict = make_tokenizer(
        "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('No bad words!') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(
        DataError, match=r"f.jsonl:3: The chat template refuses the conversation: .*No bad words!"
    ):
        chat(strict, *said("bad", "4"))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "expected a tokenizer with a chat template, got none"),
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
            "expected text that `add_generation_prompt` adds at the end",
        ),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}",
            "expected a special token that ends an assistant turn",
        ),
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}>>>{% endif %}",
            "expected a generation prompt that opens every assistant turn",
        ),
        (
            "<|im_start|>{{ messages[-1].content }}<|im_end|>{% if add_generation_prompt %}<|im_start|>{% endif %}",
            "expected every turn of a conversation rendered in order",
        ),
    ],
)
def test_a_template_that_hides_its_turns_is_refused_instead_of_training_everything(
    make_tokenizer, template, said
):
    with pytest.raises(DataError, match=said):
        chat(make_tokenizer(template), USER, REPLY)


def test_generation_prompts_and_terminators_are_measured_on_the_template(tokenizer, thinking_tokenizer):
    plain, thinking = find_markers(tokenizer), find_markers(thinking_tokenizer)
    assert plain.prompts == ("<|im_start|>assistant\n",)
    assert thinking.prompts == ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "<|im_start|>assistant\n")
    assert plain.terminators == thinking.terminators == ("<|im_end|>",)


def test_plain_text_is_supervised_up_to_its_end_token(tokenizer, supervised):
    row = encode(tokenizer, TextExample("", "xyz"))
    assert tokenizer.decode(row.input_ids) == "xyz<|im_end|>"
    assert list(row.labels) == [-100, *row.input_ids[1:]]


def test_the_completion_alone_is_supervised(tokenizer, supervised):
    row = encode(tokenizer, TextExample("the capital of France? ", "Paris"))
    assert supervised(tokenizer, row)[0].strip() == "Paris<|im_end|>"


def with_bos(make_tokenizer, template):
    tokenizer = make_tokenizer(template, bos_token="<|endoftext|>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.bos_token_id)]
    )
    return tokenizer


BOS_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    "example", [ChatExample([USER, REPLY]), TextExample("", "hello"), TextExample("", "<|endoftext|>hello")]
)
def test_chat_and_text_begin_with_exactly_one_bos(make_tokenizer, example):
    tokenizer = with_bos(make_tokenizer, BOS_TEMPLATE)
    row = encode(tokenizer, example)
    assert list(row.input_ids).count(tokenizer.bos_token_id) == 1
    assert row.input_ids[0] == tokenizer.bos_token_id
    assert row.labels[0] == -100


def test_text_gets_no_bos_from_a_tokenizer_that_adds_none(make_tokenizer):
    tokenizer = make_tokenizer(bos_token="<|im_start|>")
    assert tokenizer.bos_token_id not in encode(tokenizer, TextExample("", "hello")).input_ids


def test_a_template_that_writes_two_bos_is_refused(make_tokenizer):
    tokenizer = with_bos(make_tokenizer, "{{ bos_token }}" + BOS_TEMPLATE)
    with pytest.raises(DataError, match=r"expected one beginning-of-text token, got two `<\|endoftext\|>`"):
        chat(tokenizer, USER, REPLY)


def test_plain_text_needs_an_end_token(make_tokenizer):
    with pytest.raises(DataError, match="expected a tokenizer with an `eos_token`, got none"):
        encode(make_tokenizer(eos_token=None), TextExample("", "hello"))
