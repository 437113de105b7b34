"""Cases 1, 2, 10 and 26: which rows are used, and the account of the others."""

from __future__ import annotations

import pytest

from poros_data import DataError, RowSettings, load_dataset

CHAT = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
LONG = {"messages": [{"role": "user", "content": "w " * 9000}, {"role": "assistant", "content": "ok"}]}
ONLY_USER = {"messages": [{"role": "user", "content": "hi"}]}
ALPACA = {"instruction": "Add", "input": "1 2", "output": "3"}


def test_formats_may_be_mixed_and_are_counted(write, tokenizer):
    data = load_dataset(write(CHAT, ALPACA, {"text": "hello there"}, CHAT), tokenizer, max_length=256)
    assert data.report.schemas == {"messages": 2, "alpaca": 1, "text": 1}
    assert [row.line for row in data.rows] == [1, 2, 3, 4]


def test_tokens_are_counted(write, tokenizer):
    data = load_dataset(write(CHAT, ALPACA), tokenizer, max_length=256)
    assert (
        data.report.supervised_tokens == sum(label != -100 for row in data.rows for label in row.labels) == 4
    )
    assert data.report.total_tokens == sum(len(row.input_ids) for row in data.rows)
    assert data.report.longest_tokens == max(len(row.input_ids) for row in data.rows)


def test_unusable_rows_are_dropped_and_counted_by_reason(write, tokenizer):
    data = load_dataset(write(LONG, CHAT, ONLY_USER, LONG), tokenizer, max_length=128)
    assert [row.line for row in data.rows] == [2]
    dropped = {reason: (count.count, count.first_line) for reason, count in data.report.dropped.items()}
    assert dropped == {"longer than max_length 128": (2, 1), "no supervised token": (1, 3)}
    (line,) = [line for line in data.report.lines() if "longer than max_length 128" in line]
    assert line == (
        "dropped 2 rows: longer than max_length 128 (first: line 1); raise `max_length`, or cut rows with "
        "`rows.truncation`"
    )


def test_a_row_is_never_cut(write, tokenizer):
    whole = load_dataset(write(CHAT), tokenizer, max_length=4096).rows[0]
    assert load_dataset(write(CHAT), tokenizer, max_length=len(whole.input_ids)).rows[0] == whole


@pytest.mark.parametrize(
    ("row", "got"),
    [(LONG, r"got \d+ tokens"), (ONLY_USER, "got no trained assistant turn, or no text in it")],
)
def test_an_unusable_row_stops_the_run_if_asked(write, tokenizer, row, got):
    with pytest.raises(DataError, match=rf"Unusable row: .*{got} \(.*data.jsonl:2\)"):
        load_dataset(write(CHAT, row), tokenizer, max_length=128, settings=RowSettings(truncation="error"))


def test_a_data_set_without_supervised_token_is_refused(write, tokenizer):
    with pytest.raises(
        DataError, match=r"Nothing to train on: .*1 rows dropped: longer than .*; 2 rows dropped: no sup"
    ):
        load_dataset(write(LONG, ONLY_USER, ONLY_USER), tokenizer, max_length=128)


def test_every_bad_row_is_counted_before_the_first_is_reported(write, tokenizer):
    path = write(
        ALPACA, {"instruction": "Add", "response": "3"}, CHAT, {"instruction": "Add", "response": "4"}
    )
    with pytest.raises(DataError, match=r"Unknown row format: .*data.jsonl:2.* 2 of 4 rows cannot be used"):
        load_dataset(path, tokenizer, max_length=128)


def test_the_last_supervised_token_of_row_0_is_shown(write, tokenizer):
    report = load_dataset(write(CHAT), tokenizer, max_length=128).report
    assert report.last_supervised_token == "<|im_end|>"
    assert report.warnings == ()


def test_a_last_supervised_token_that_stops_nothing_is_warned_about(write, make_tokenizer):
    base = make_tokenizer(eos_token="<|endoftext|>")
    assert (
        "`<|im_end|>`, which does not stop generation"
        in load_dataset(write(CHAT), base, max_length=128).report.warnings[0]
    )
    stops = [base.convert_tokens_to_ids("<|im_end|>")]
    assert load_dataset(write(CHAT), base, max_length=128, stop_token_ids=stops).report.warnings == ()


def test_turns_that_lose_text_are_counted_and_warned_about(write, tokenizer):
    reasoning = [{**CHAT["messages"][1], "reasoning_content": "easy"}]
    report = load_dataset(
        write(CHAT, {"messages": CHAT["messages"][:1] + reasoning}), tokenizer, max_length=128
    ).report
    assert (report.lost_turns["assistant"].count, report.lost_turns["assistant"].first_line) == (1, 2)
    assert report.lines()[-1] == "warning: 1 assistant turns lost text in the chat template (first: line 2)"


def test_the_fingerprint_repeats(write, make_tokenizer):
    first = load_dataset(write(CHAT), make_tokenizer(), max_length=128)
    used = make_tokenizer()
    used("x", padding="max_length", max_length=8, truncation=True)
    assert load_dataset(write(CHAT), used, max_length=128).parts == first.parts


@pytest.mark.parametrize(
    ("row", "template", "max_length", "changed"),
    [
        ({**CHAT, "id": 1}, None, 128, {"data"}),
        (ALPACA, None, 128, {"data", "rows"}),
        (CHAT, "{# other #}", 128, {"template"}),
        (CHAT, None, 129, {"settings"}),
    ],
)
def test_the_fingerprint_tells_what_changed(write, make_tokenizer, row, template, max_length, changed):
    tokenizer = make_tokenizer()
    before = load_dataset(write(CHAT), tokenizer, max_length=128)
    tokenizer.chat_template = (template or "") + tokenizer.chat_template
    after = load_dataset(write(row), tokenizer, max_length=max_length)
    assert {part for part in before.parts if before.parts[part] != after.parts[part]} == changed
    assert before.fingerprint != after.fingerprint


def test_a_changed_tokenizer_changes_the_fingerprint(write, make_tokenizer):
    before = load_dataset(write(CHAT), make_tokenizer(), max_length=128)
    grown = make_tokenizer()
    grown.add_tokens(["zebra"])
    assert load_dataset(write(CHAT), grown, max_length=128).parts["tokenizer"] != before.parts["tokenizer"]


def test_a_maximal_length_that_holds_no_supervised_token_is_refused(write, tokenizer):
    with pytest.raises(DataError, match="Bad setting `max_length`"):
        load_dataset(write(CHAT), tokenizer, max_length=1)


@pytest.mark.parametrize("setting", [{"truncation": "cut"}, {"order": "random"}])
def test_a_bad_setting_is_named(setting):
    with pytest.raises(DataError, match="Bad setting `"):
        RowSettings(**setting)


def test_the_summary_says_what_was_used(write, tokenizer):
    lines = load_dataset(write(CHAT, ALPACA, ONLY_USER), tokenizer, max_length=128).report.lines()
    assert lines[0].endswith("data.jsonl: 2 of 3 rows used (2 messages, 1 alpaca)")
    assert "4 of " in lines[1]
    assert lines[1].endswith("row 0 ends with '<|im_end|>'")
