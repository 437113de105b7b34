"""Case 10 and its kind: which format a row is in, and what is said when it is in none."""

from __future__ import annotations

import pytest

from poros_data.errors import DataError
from poros_data.formats import ChatExample, TextExample
from poros_data.schemas import parse_row

WHERE = "mixed.jsonl:4"


def parse(row: dict) -> tuple[str, ChatExample | TextExample]:
    return parse_row(row, where=WHERE)


def failure(row: dict) -> str:
    with pytest.raises(DataError) as caught:
        parse(row)
    message = str(caught.value)
    assert f"({WHERE})" in message
    return message


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.mark.parametrize(
    ("row", "schema", "example"),
    [
        ({"messages": turns("q", "a"), "id": 7}, "messages", ChatExample(turns("q", "a"))),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            "sharegpt",
            ChatExample(turns("q", "a")),
        ),
        (
            {"instruction": "Add", "input": "1 2", "output": "3"},
            "alpaca",
            ChatExample(turns("Add\n\n1 2", "3")),
        ),
        ({"instruction": "Add", "output": "3"}, "alpaca", ChatExample(turns("Add", "3"))),
        ({"instruction": "Add", "input": None, "output": "3"}, "alpaca", ChatExample(turns("Add", "3"))),
        ({"instruction": "Add", "output": "3", "text": "###"}, "alpaca", ChatExample(turns("Add", "3"))),
        ({"prompt": "1+1=", "completion": "2"}, "prompt-completion", TextExample("1+1=", "2")),
        ({"text": "once", "meta": {}}, "text", TextExample("", "once")),
        ({"messages": None, "text": "once"}, "text", TextExample("", "once")),
    ],
)
def test_a_row_is_read_in_its_format_and_extra_columns_are_ignored(row, schema, example):
    assert parse(row) == (schema, example)


@pytest.mark.parametrize(
    "row",
    [
        {"system": "Be brief.", "messages": turns("q", "a")},
        {"system": "Be brief.", "instruction": "q", "output": "a"},
        {
            "system": "Be brief.",
            "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
        },
    ],
)
def test_a_system_column_becomes_the_system_turn(row):
    assert parse(row)[1] == ChatExample([{"role": "system", "content": "Be brief."}, *turns("q", "a")])


def test_a_prompt_and_completion_of_turns_are_a_conversation_of_which_the_completion_is_supervised():
    row = {"prompt": turns("q", "a", "q2"), "completion": [{"role": "assistant", "content": "a2"}]}
    expected = ChatExample(turns("q", "a", "q2", "a2"), (), frozenset({1}))
    assert parse(row) == ("prompt-completion", expected)


def test_reasoning_content_is_passed_on():
    row = {"messages": [{"role": "assistant", "content": "a", "reasoning_content": "r"}]}
    assert parse(row)[1] == ChatExample(row["messages"])


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse({"messages": [{"role": "user", "content": parts}]})[1] == ChatExample(turns("ab"))


def test_an_unknown_format_names_the_keys_the_formats_and_the_nearest_one():
    message = failure({"instruction": "Add", "response": "3"})
    assert "got the keys ['instruction', 'response']" in message
    assert "messages | conversations | instruction+output | prompt+completion | text" in message
    assert "Nearest is `alpaca`: rename `response` to `output`" in message


@pytest.mark.parametrize(
    ("row", "nearest"),
    [
        ({"TEXT": "a"}, "Nearest is `text`: rename `TEXT` to `text`"),
        ({"Messages": []}, "Nearest is `messages`: rename `Messages` to `messages`"),
        ({"question": "a", "answer": "b"}, "rename `question` to `instruction`, rename `answer` to `output`"),
        ({"prompt": "a", "chosen": "b"}, "Nearest is `prompt-completion`: add `completion`"),
        ({"data": [{"text": "a"}]}, "jq -c '.data[]' FILE > rows.jsonl"),
        ({"samples": [{"role": "assistant", "content": "a"}]}, "Rename `samples` to `messages`"),
        (
            {"input": [{"role": "user", "content": "a"}], "ideal": "b"},
            """jq -c '{messages: (.input + [{role: "assistant", content: .ideal}])}' FILE > rows.jsonl""",
        ),
        (
            {"input": [{"role": "user", "content": "a"}], "ideal": ["b", "c"]},
            """jq -c '{messages: (.input + [{role: "assistant", content: .ideal[0]}])}' FILE > rows.jsonl""",
        ),
        ({"a": 1}, "Rename the columns to one of these formats"),
        ({}, "Rename the columns to one of these formats"),
    ],
)
def test_the_nearest_format_is_the_one_with_the_fewest_changes(row, nearest):
    assert nearest in failure(row)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": None}, "`text`: expected a string, got null"),
        ({"text": 3}, "`text`: expected a string, got a number: 3"),
        ({"instruction": "a", "output": ["b"]}, "`output`: expected a string, got an array: ['b']"),
        ({"messages": None}, "`messages`: expected an array of turns, got null"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "expected text parts only, got a string: 'hi'"),
        ({"messages": "hi"}, "`messages`: expected an array of turns, got a string: 'hi'"),
        ({"messages": []}, "`messages`: expected at least one turn, got an empty array"),
        ({"messages": ["hi"]}, "`messages[0]`: expected an object, got a string: 'hi'"),
        ({"messages": [{"content": "a"}]}, "`messages[0].role`: expected a string, got null"),
        ({"messages": [{"role": "user"}]}, "`messages[0].content`: expected a string, got null"),
        ({"messages": [{"role": "human", "content": "a"}]}, "got 'human' (mixed.jsonl:4). Write `user`."),
        (
            {"messages": [{"role": "bot", "content": "a"}]},
            "expected system | user | assistant | tool, got 'bot'",
        ),
        ({"messages": [{"role": "function", "content": "a"}]}, "Write `tool`."),
        ({"messages": [{"from": "human", "value": "a"}]}, "Name the column `conversations`"),
        ({"conversations": turns("q", "a")}, "Name the column `messages`"),
        ({"conversations": [{"from": "bing", "value": "a"}]}, "got 'bing'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "got a part of type 'image'"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(row, said):
    assert said in failure(row)
