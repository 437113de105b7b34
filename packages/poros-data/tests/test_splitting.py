"""Held-out rows: disjoint, seeded, and the same ones whatever their place."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from poros_data import DataError, DataReport, Dataset, Row, SourceReport, hold_out
from poros_data.rows import digest_rows
from poros_data.sources import DataFile


def dataset(rows: Sequence[Row]) -> Dataset:
    source = SourceReport(
        name="rows.jsonl",
        weight=1.0,
        num_files=1,
        schemas={"text": len(rows)},
        num_rows=len(rows),
        ignored=(),
    )
    report = DataReport(
        sources=(source,),
        num_rows=len(rows),
        schemas={"text": len(rows)},
        dropped={},
        truncated={},
        cut_tokens=0,
        repaired=None,
        lost_turns={},
        supervised_tokens=sum(row.num_supervised for row in rows),
        total_tokens=sum(len(row.input_ids) for row in rows),
        longest_tokens=max(len(row.input_ids) for row in rows),
        lengths={4: len(rows)},
        last_supervised_token="x",
        last_supervised_id=1,
        warnings=(),
    )
    files = (DataFile(name="rows.jsonl", kind="jsonl"),)
    return Dataset(
        rows=tuple(rows), files=files, weights=(1.0,), report=report, parts={"rows": digest_rows(rows)}
    )


def row(number: int, line: int | None = None) -> Row:
    ids = [number, number + 1, 2]
    return Row(ids, [-100, *ids[1:]], number + 1 if line is None else line)


ROWS = [row(number) for number in range(40)]


def keys(rows: Sequence[Row]) -> set[tuple[int, ...]]:
    return {tuple(each.input_ids) for each in rows}


def test_the_share_is_taken_and_no_row_is_on_both_sides() -> None:
    kept, held = hold_out(dataset(ROWS), 0.25, seed=0)
    assert (len(kept.rows), len(held.rows)) == (30, 10)
    assert keys(kept.rows) | keys(held.rows) == keys(ROWS)
    assert not keys(kept.rows) & keys(held.rows)


def test_both_sides_keep_the_order_of_the_file() -> None:
    for side in hold_out(dataset(ROWS), 0.25, seed=0):
        lines = [each.line for each in side.rows]
        assert lines == sorted(lines)


def test_the_same_seed_holds_out_the_same_rows_in_any_order_of_the_file() -> None:
    _, first = hold_out(dataset(ROWS), 0.25, seed=3)
    _, second = hold_out(dataset(ROWS[::-1]), 0.25, seed=3)
    assert keys(first.rows) == keys(second.rows)


def test_another_seed_holds_out_others_and_shows_in_the_fingerprint() -> None:
    first, second = (hold_out(dataset(ROWS), 0.25, seed=seed) for seed in (0, 1))
    assert keys(first[1].rows) != keys(second[1].rows)
    assert first[0].parts["held_out"] != second[0].parts["held_out"]
    assert first[0].fingerprint != dataset(ROWS).fingerprint


def test_equal_rows_stay_on_one_side() -> None:
    doubled = [*ROWS, *(row(number, line=100 + number) for number in range(40))]
    kept, held = hold_out(dataset(doubled), 0.3, seed=0)
    assert not keys(kept.rows) & keys(held.rows)
    assert len(held.rows) == 24


def test_the_pieces_of_one_line_stay_on_one_side() -> None:
    pieces = [row(number, line=1 + number // 4) for number in range(40)]
    kept, held = hold_out(dataset(pieces), 0.2, seed=0)
    assert len(held.rows) == 8
    assert not {each.line for each in kept.rows} & {each.line for each in held.rows}


def test_a_small_share_is_one_row_and_a_large_one_never_all() -> None:
    assert len(hold_out(dataset(ROWS), 0.0001, seed=0)[1].rows) == 1
    assert len(hold_out(dataset(ROWS), 0.9999, seed=0)[0].rows) == 1


def test_the_reports_count_what_each_side_has() -> None:
    kept, held = hold_out(dataset(ROWS), 0.25, seed=0)
    assert (kept.report.total_tokens, held.report.total_tokens) == (90, 30)
    assert (kept.report.supervised_tokens, held.report.supervised_tokens) == (60, 20)
    assert held.report.lengths == {4: 10}
    assert kept.report.notes[-1] == "held out: 0.25 of the rows, seed 0: 10 rows, 30 to train on"
    assert DataReport.from_record(held.report.record()) == held.report


def test_rows_of_one_kind_cannot_be_held_out() -> None:
    same = [row(1, line=line) for line in range(5)]
    with pytest.raises(DataError, match="at least two lines that differ"):
        hold_out(dataset(same), 0.5, seed=0)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_a_share_of_none_or_all_is_refused(fraction: float) -> None:
    with pytest.raises(DataError, match="`eval_fraction`: expected a share between 0 and 1"):
        hold_out(dataset(ROWS), fraction, seed=0)


@pytest.mark.parametrize("seed", range(6))
def test_lines_that_share_a_row_stay_on_one_side(seed: int) -> None:
    """Documents that begin alike and were cut into pieces: case of a leak through a shared piece."""

    def piece(ids: list[int], line: int) -> Row:
        return Row(ids, [-100, *ids[1:]], line)

    rows = [
        piece([1, 2, 3, 4], 1),
        piece([5, 6], 1),
        piece([1, 2, 3, 4], 2),
        piece([7, 8], 2),
        piece([9, 9], 3),
    ]
    kept, held = hold_out(dataset(rows), 0.5, seed=seed)
    assert not keys(kept.rows) & keys(held.rows)
    assert len({each.line in (1, 2) for each in held.rows}) == 1
