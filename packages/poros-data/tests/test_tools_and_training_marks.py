"""Tool schemas, tool calls and `train: false`, in every form that files keep them."""

from __future__ import annotations

import json

import pytest

from poros_data.encode import Encoder
from poros_data.errors import DataError
from poros_data.formats import ChatExample
from poros_data.schemas import parse_row

FUNCTION = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"type": "function", "function": FUNCTION}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
QUESTION = {"role": "user", "content": "1+1?"}

# Written for these tests: tools as Qwen writes them.
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}:{{ call.function.arguments | tojson }}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Written for these tests: tools as Gemma 4 writes them. Answers stand inside the assistant's turn, which goes on.
JOINED = (
    "{% set ns = namespace(last='') %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|endoftext|>{{ m.content }}<|pad|>"
    "{% else %}"
    "{% if ns.last != 'assistant' or m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments | tojson }})"
    "{% endfor %}"
    "{% if m.tool_calls and (loop.last or loop.nextitem.role != 'tool') %}<|endoftext|>"
    "{% elif not m.tool_calls and (loop.last or loop.nextitem.role == 'user') %}<|im_end|>\n{% endif %}"
    "{% set ns.last = m.role %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>assistant\n{% endif %}"
)


def parse(row: dict) -> ChatExample:
    example = parse_row(row, where="f.jsonl:1")[1]
    assert isinstance(example, ChatExample)
    return example


def encode(tokenizer, row: dict):
    return Encoder(tokenizer).encode([("f.jsonl:1", parse(row))])[0]


@pytest.fixture(scope="module")
def joined(make_tokenizer):
    tokenizer = make_tokenizer(JOINED)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|pad|>"]})
    return tokenizer


@pytest.mark.parametrize(
    "tools", [[SCHEMA], [FUNCTION], json.dumps([SCHEMA]), [json.dumps(SCHEMA)], json.dumps([FUNCTION])]
)
def test_schemas_come_in_one_form_whatever_the_file_has(tools):
    assert parse({"messages": [QUESTION], "tools": tools}).tools == (SCHEMA,)


@pytest.mark.parametrize("tools", [None, "", [], "[]"])
def test_no_tools_are_none(tools):
    assert parse({"messages": [QUESTION], "tools": tools}).tools == ()


@pytest.mark.parametrize(
    "turn",
    [
        {"tool_calls": [CALL]},
        {"tool_calls": [{"name": "add", "arguments": {"a": 1}}]},
        {"tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"tool_calls": json.dumps([CALL])},
        {"function_call": {"name": "add", "arguments": '{"a": 1}'}},
    ],
)
def test_calls_come_in_one_form_with_arguments_as_objects(turn):
    row = {"messages": [QUESTION, {"role": "assistant", "content": None, **turn}]}
    assert parse(row).messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_an_answer_keeps_the_call_it_belongs_to():
    turns = [
        QUESTION,
        {"role": "assistant", "tool_calls": [{**CALL, "id": "c1"}]},
        {"role": "tool", "content": "2", "name": "add", "tool_call_id": "c1"},
    ]
    messages = parse({"messages": turns}).messages
    assert messages[1]["tool_calls"][0]["id"] == "c1"
    assert messages[2] == turns[2]


def test_sharegpt_calls_and_observations_are_tool_turns():
    row = {
        "conversations": [
            {"from": "human", "value": "1+1?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "It is 2."},
        ],
        "tools": json.dumps([FUNCTION]),
    }
    example = parse(row)
    assert [message["role"] for message in example.messages] == ["user", "assistant", "tool", "assistant"]
    assert example.messages[1]["tool_calls"] == [CALL]
    assert example.tools == (SCHEMA,)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [QUESTION], "tools": "no"}, "`tools`: expected an array of tool schemas, or a string"),
        (
            {"messages": [QUESTION], "tools": {"a": 1}},
            "`tools`: expected an array of tool schemas, got an object",
        ),
        (
            {"messages": [QUESTION], "tools": [{"type": "function"}]},
            '`tools[0]`: expected `{"type": "function"',
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "name: expected a string, got null"),
        ({"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]}, "expected an array of tool calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "a", "arguments": "x"}]}]},
            "arguments: expected an object, or a string that holds its JSON, got a string: 'x'",
        ),
        ({"messages": [{**QUESTION, "tool_calls": [CALL]}]}, "expected tool calls in assistant turns alone"),
        ({"messages": [{**QUESTION, "train": True}]}, "expected assistant turns alone to be trained"),
        (
            {"messages": [{**QUESTION, "train": "no"}]},
            "`messages[0].train`: expected true or false, got a string",
        ),
        (
            {"messages": [{**QUESTION, "weight": 0.5}]},
            "`messages[0].weight`: expected true or false, got a number",
        ),
        ({"instruction": "a", "output": "b", "history": [["q"]]}, "expected a [question, answer] pair"),
    ],
)
def test_what_is_wrong_with_them_is_named(row, said):
    with pytest.raises(DataError) as caught:
        parse(row)
    assert said in str(caught.value)


def test_an_alpaca_history_comes_before_the_question():
    example = parse({"instruction": "b", "output": "2", "history": [["a", "1"]]})
    assert [message["content"] for message in example.messages] == ["a", "1", "b", "2"]


def test_schemas_and_calls_are_rendered_and_the_call_is_supervised(make_tokenizer, supervised):
    tokenizer = make_tokenizer(TOOLS)
    row = {
        "tools": [FUNCTION],
        "messages": [
            QUESTION,
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "It is 2."},
        ],
    }
    encoded = encode(tokenizer, row)
    assert '"description": "Adds."' in tokenizer.decode(encoded.input_ids)
    assert supervised(tokenizer, encoded) == ['<call>add:{"a": 1}<|im_end|>', "It is 2.<|im_end|>"]


@pytest.mark.parametrize("row", [{"tools": [FUNCTION]}, {}])
def test_a_template_that_leaves_tools_out_is_refused(tokenizer, row):
    messages = [QUESTION, {"role": "assistant", "content": "1", "tool_calls": [CALL]}]
    with pytest.raises(
        DataError, match=r"f.jsonl:1: The chat template leaves tools out: .* got none of 'add'"
    ):
        encode(tokenizer, {"messages": messages, **row})


def test_an_answer_inside_the_turn_is_not_supervised_and_what_stops_the_call_is(joined, supervised):
    messages = [
        QUESTION,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "It is 2."},
        QUESTION,
        {"role": "assistant", "content": "2"},
    ]
    encoded = encode(joined, {"messages": messages})
    assert supervised(joined, encoded) == ['add({"a": 1})<|endoftext|>', "It is 2.<|im_end|>", "2<|im_end|>"]
    assert encoded.lost_roles == ()


def test_an_answer_inside_the_turn_without_marks_of_its_own_is_refused(make_tokenizer):
    unmarked = make_tokenizer(JOINED)  # here `<|pad|>` is text like any other
    messages = [
        QUESTION,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]
    with pytest.raises(DataError, match="does not open each assistant turn"):
        encode(unmarked, {"messages": messages})


def test_a_call_at_the_end_is_supervised_up_to_what_stops_it(joined, supervised):
    encoded = encode(joined, {"messages": [QUESTION, {"role": "assistant", "tool_calls": [CALL]}]})
    assert supervised(joined, encoded) == ['add({"a": 1})<|endoftext|>']


def test_a_call_without_answer_does_not_run_on_into_the_next_turn(joined, supervised):
    messages = [
        QUESTION,
        {"role": "assistant", "tool_calls": [CALL]},
        QUESTION,
        {"role": "assistant", "content": "2"},
    ]
    assert supervised(joined, encode(joined, {"messages": messages})) == [
        'add({"a": 1})<|endoftext|>',
        "2<|im_end|>",
    ]


@pytest.mark.parametrize("mark", [{"train": False}, {"weight": 0}])
def test_a_turn_that_is_not_to_be_trained_is_context(tokenizer, supervised, mark):
    messages = [
        QUESTION,
        {"role": "assistant", "content": "3", **mark},
        QUESTION,
        {"role": "assistant", "content": "2", "train": True},
    ]
    encoded = encode(tokenizer, {"messages": messages})
    assert "3<|im_end|>" in tokenizer.decode(encoded.input_ids)
    assert supervised(tokenizer, encoded) == ["2<|im_end|>"]


def test_a_call_that_is_not_to_be_trained_is_context_inside_a_joined_turn(joined, supervised):
    messages = [
        QUESTION,
        {"role": "assistant", "tool_calls": [CALL], "train": False},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]
    assert supervised(joined, encode(joined, {"messages": messages})) == ["It is 2.<|im_end|>"]


def test_turns_that_the_template_joins_must_be_trained_alike(joined):
    messages = [
        QUESTION,
        {"role": "assistant", "content": "1", "train": False},
        {"role": "assistant", "content": "2"},
    ]
    with pytest.raises(DataError, match=r"writes the turns \[1, 2\] as one: expected the same `train`"):
        encode(joined, {"messages": messages})
