"""Cases 9 and 26 and their kinds: rows that are too long, and conversations that a template refuses."""

from __future__ import annotations

import json

import pytest

from poros_data import DataError, RowSettings, load_dataset

QUESTION, ANSWER = {"role": "user", "content": "w " * 60}, {"role": "assistant", "content": "ok then"}
LONG = {"messages": [QUESTION, ANSWER]}
SHORT = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
LONG_ANSWER = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "w " * 60}]}

# Written for these tests: what Gemma 3 demands of roles. The system turn goes into the first user turn.
STRICT = (
    "{{ bos_token }}{% set ns = namespace(first='') %}"
    "{% if messages[0].role == 'system' %}{% set ns.first = messages[0].content + '\n\n' %}"
    "{% set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif %}"
    "{% for m in loop_messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{% if loop.first %}{{ ns.first }}{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + STRICT
)


def load(path, tokenizer, truncation, max_length=64):
    return load_dataset(path, tokenizer, max_length=max_length, settings=RowSettings(truncation=truncation))


def test_truncate_left_keeps_the_answer(write, tokenizer, supervised):
    data = load(write(LONG), tokenizer, "truncate-left")
    (row,) = data.rows
    assert len(row.input_ids) == 64
    assert supervised(tokenizer, row) == ["ok then<|im_end|>"]
    assert data.report.truncated["truncate-left"].count == 1


def test_what_was_cut_is_counted(write, tokenizer):
    path = write(SHORT, LONG, LONG)
    whole = load(path, tokenizer, "drop", 4096).report.total_tokens
    report = load(path, tokenizer, "truncate-left").report
    assert report.cut_tokens == whole - report.total_tokens
    assert f"truncate-left cut 2 rows, {report.cut_tokens} tokens left out (first: line 2)" in report.lines()


def test_truncate_left_keeps_the_beginning_of_text(write, make_tokenizer):
    tokenizer = make_tokenizer(STRICT, bos_token="<|endoftext|>")
    (row,) = load(write(LONG), tokenizer, "truncate-left").rows
    assert row.input_ids[0] == tokenizer.bos_token_id
    assert list(row.input_ids).count(tokenizer.bos_token_id) == 1
    assert len(row.input_ids) == 64


def test_truncate_right_keeps_the_beginning(write, tokenizer):
    path = write(LONG_ANSWER)
    (whole,) = load(path, tokenizer, "drop", 4096).rows
    data = load(path, tokenizer, "truncate-right")
    assert list(data.rows[0].input_ids) == list(whole.input_ids[:64])
    assert list(data.rows[0].labels) == list(whole.labels[:64])
    assert data.report.last_supervised_id is None
    assert data.report.warnings == ()


def test_a_row_with_nothing_supervised_left_is_dropped_and_counted(write, tokenizer):
    report = load(write(LONG, SHORT), tokenizer, "truncate-right").report
    assert report.dropped["no supervised token left after truncation"].count == 1
    assert report.truncated == {}


def test_nothing_left_at_all_is_refused(write, tokenizer):
    with pytest.raises(DataError, match="1 rows dropped: no supervised token left after truncation"):
        load(write(LONG), tokenizer, "truncate-right")


def test_split_cuts_plain_text_into_rows_and_drops_conversations(write, tokenizer):
    text = "the quick brown fox " * 20
    (whole,) = load(write({"text": text}), tokenizer, "drop", 4096).rows
    data = load(write({"text": text}, LONG), tokenizer, "split")
    pieces = [list(row.input_ids) for row in data.rows]
    assert [token for piece in pieces for token in piece] == list(whole.input_ids)
    assert all(len(piece) == 64 for piece in pieces[:-1])
    assert all(row.labels[0] == -100 and list(row.labels[1:]) == list(row.input_ids[1:]) for row in data.rows)
    assert data.report.dropped["longer than max_length 64"].first == "line 2"
    assert "split 1 rows into pieces (first: line 1)" in data.report.lines()


def test_every_piece_begins_with_the_beginning_of_text(write, make_tokenizer):
    tokenizer = make_tokenizer(bos_token="<|endoftext|>")
    text = "<|endoftext|>" + "the quick brown fox " * 20
    data = load(write({"text": text}), tokenizer, "split")
    assert len(data.rows) > 1
    assert all(row.input_ids[0] == tokenizer.bos_token_id for row in data.rows)


def test_lengths_are_counted_before_any_cut(write, tokenizer):
    assert sum(load(write(LONG, SHORT), tokenizer, "truncate-left").report.lengths.values()) == 2


def conversation(*turns: str) -> dict:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return {"messages": [{"role": roles[turn[0]], "content": turn[1:]} for turn in turns]}


MIXED = conversation("sBe brief.", "ua", "ub", "ac")


def test_refused_turns_name_the_line_the_template_s_words_and_the_way_out(write, make_tokenizer):
    with pytest.raises(DataError) as caught:
        load_dataset(
            write(SHORT, MIXED, MIXED), make_tokenizer(STRICT, bos_token="<|endoftext|>"), max_length=64
        )
    message = str(caught.value)
    assert "data.jsonl:2: The chat template refuses the conversation" in message
    assert "Roles must alternate" in message
    assert "`rows.repair: true` merges such turns" in message
    assert "2 of 3 rows cannot be used" in message


@pytest.mark.parametrize("template", [STRICT, NO_SYSTEM])
def test_repair_merges_neighbours_and_folds_the_system_turn_and_counts(
    write, make_tokenizer, supervised, template
):
    tokenizer = make_tokenizer(template, bos_token="<|endoftext|>")
    data = load_dataset(write(SHORT, MIXED), tokenizer, max_length=64, settings=RowSettings(repair=True))
    text = tokenizer.decode(data.rows[1].input_ids)
    assert "<|im_start|>user\nBe brief.\n\na\n\nb<|im_end|>" in text
    assert supervised(tokenizer, data.rows[1]) == ["c<|im_end|>"]
    assert (data.report.repaired.count, data.report.repaired.first) == (1, "line 2")
    assert "merged turns of 1 rows for the chat template (first: line 2)" in data.report.lines()


def test_repair_leaves_conversations_alone_that_the_template_takes(write, tokenizer):
    data = load_dataset(write(MIXED), tokenizer, max_length=64, settings=RowSettings(repair=True))
    assert "<|im_start|>user\nb" in tokenizer.decode(data.rows[0].input_ids)
    assert data.report.repaired is None


def test_repair_does_not_merge_a_trained_turn_with_an_untrained_one(write, make_tokenizer):
    messages = [*SHORT["messages"], {"role": "assistant", "content": "5", "train": False}]
    tokenizer = make_tokenizer(STRICT, bos_token="<|endoftext|>")
    with pytest.raises(DataError, match="Roles must alternate"):
        load_dataset(
            write({"messages": messages}), tokenizer, max_length=64, settings=RowSettings(repair=True)
        )


def test_what_repair_cannot_mend_is_refused(write, make_tokenizer):
    tokenizer = make_tokenizer(STRICT, bos_token="<|endoftext|>")
    with pytest.raises(DataError) as caught:
        load_dataset(write(conversation("aHello!", "ub")), tokenizer, max_length=64)
    assert "rows.repair" not in str(caught.value)


def test_a_template_of_the_user_s_own_is_used_and_is_in_the_fingerprint(
    write, tokenizer, supervised, tmp_path
):
    (tmp_path / "own.jinja").write_text(tokenizer.chat_template.replace("You help.", "Answer!"))
    settings = RowSettings(template=str(tmp_path / "own.jinja"))
    own = load_dataset(write(SHORT), tokenizer, max_length=64, settings=settings)
    assert "Answer!" in tokenizer.decode(own.rows[0].input_ids)
    assert supervised(tokenizer, own.rows[0]) == ["4<|im_end|>"]
    stock = load_dataset(write(SHORT), tokenizer, max_length=64)
    assert own.parts["template"] != stock.parts["template"]
    assert any("own.jinja: generate with the same template" in line for line in own.report.lines())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "Cannot read the chat template: expected a Jinja file"),
        ("", "got an empty file"),
        ("{% for %}", "TemplateSyntaxError"),
    ],
)
def test_a_bad_template_file_is_refused(write, tokenizer, tmp_path, text, said):
    if text is not None:
        (tmp_path / "own.jinja").write_text(text)
    settings = RowSettings(template=str(tmp_path / "own.jinja"))
    with pytest.raises(DataError, match=said):
        load_dataset(write(SHORT), tokenizer, max_length=64, settings=settings)


def test_the_report_survives_json(write, tokenizer):
    report = load(write(SHORT, LONG, {"messages": [QUESTION]}), tokenizer, "truncate-left").report
    assert type(report).from_record(json.loads(json.dumps(report.record()))) == report
