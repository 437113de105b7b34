"""`poros report` on a real tiny run, and on what can be left of one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from poros_cli.main import run

Edit = Callable[[dict[str, Any]], object]


class Page(HTMLParser):
    """Collects tags, attributes that could ask for something, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v or "" for name, v in attrs if name in ("src", "href", "srcset", "action", "data")]

    def handle_data(self, data: str) -> None:
        self.text += f" {data}"


@pytest.fixture(scope="module")
def finished(saved_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with evaluations; never written to."""
    folder = tmp_path_factory.mktemp("report")
    rows = folder / "rows.jsonl"
    lines = [{"instruction": f"Say {index}", "output": f"Number {index}."} for index in range(6)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--model", str(saved_model), "--data", str(rows), "--output", str(folder / "out")]
    arguments += ["--eval-data", str(rows), "--eval-every", "2", "--device", "cpu", "--micro-batches", "2"]
    assert run(["train", *arguments]) == 0
    return folder / "out"


@pytest.fixture
def made(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run's two files that a test may change."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("run.json", "metrics.jsonl"):
        shutil.copy(finished / name, folder)
    return folder


def change(folder: Path, edit: Edit) -> None:
    record = json.loads((folder / "run.json").read_text())
    edit(record)
    (folder / "run.json").write_text(json.dumps(record))


def report(folder: Path) -> Page:
    assert run(["report", str(folder)]) == 0
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def metric_lines(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines()


def write_metrics(folder: Path, lines: list[str], end: str = "\n") -> None:
    (folder / "metrics.jsonl").write_text("\n".join(lines) + end)


def test_a_finished_run_has_every_section(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = report(made)
    assert capsys.readouterr().out == f"Wrote {made / 'report.html'}.\n"
    assert "finished All 3 steps are done." in page.text
    titles = (
        "Loss",
        "Learning rate",
        "Gradient norm",
        "Tokens per second",
        "Seconds per step",
        "Host memory",
    )
    sections = (
        "Predicted and measured",
        "One step",
        "Data",
        "Parity receipts",
        "The resolved config",
        "Fingerprint",
    )
    for title in (*titles, *sections):
        assert title in page.text
    assert "held-out loss" in page.text
    assert "6 of 6 rows used (6 alpaca)" in page.text
    assert "Planned, not measured" in page.text
    assert "optimizer.learning_rate 0.0002" in page.text


def test_the_page_asks_for_nothing_and_runs_nothing(made: Path) -> None:
    page = report(made)
    text = (made / "report.html").read_text()
    assert page.links == ["data:,"]
    assert not {"script", "img", "iframe", "object", "form"} & set(page.tags)
    assert "http" not in text.replace("http-equiv", "")
    assert "url(" not in text
    assert "@import" not in text


def test_the_same_run_gives_the_same_bytes(made: Path) -> None:
    report(made)
    first = (made / "report.html").read_bytes()
    report(made)
    assert (made / "report.html").read_bytes() == first


def test_what_a_user_wrote_is_escaped_everywhere(made: Path) -> None:
    evil = "<script>alert('x')</script>\"'&"
    folder = made.rename(made.with_name("<script>run&"))

    def poison(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: poison(item) for key, item in value.items()}
        if isinstance(value, list):
            return [poison(item) for item in value]
        return value + evil if isinstance(value, str) else value

    record = json.loads((folder / "run.json").read_text())
    kept = {name: record[name] for name in ("plan", "predicted_timeline")}
    poisoned = {**poison(record), **kept, "notes": [evil], "binding": "link"}
    poisoned["config"] |= {evil: evil}
    poisoned["fingerprint"] |= {evil: evil}
    poisoned["data"]["training"]["dropped"] = {evil: {"count": 1, "first_line": 1, "first": evil}}
    poisoned["predicted_device_bytes"][evil] = 5
    (folder / "run.json").write_text(json.dumps(poisoned))
    page = report(folder)
    assert "script" not in page.tags
    assert page.text.count("<script>alert('x')") > 20
    assert page.links == ["data:,"]


def test_a_path_that_is_no_text_is_shown_with_escapes(made: Path) -> None:
    change(made, lambda record: record["model"].update(name="models/\udcff"))
    assert "models/\\udcff" in report(made).text


def test_an_unfinished_run_says_so(made: Path) -> None:
    change(made, lambda record: record.pop("result"))
    write_metrics(made, metric_lines(made)[:1])
    page = report(made)
    assert "unfinished No end is recorded: 1 of 3 steps are" in page.text
    assert "No evaluation was recorded." in page.text


def test_an_interrupted_and_a_resumed_run_say_so(made: Path) -> None:
    change(made, lambda record: record["result"].update(interrupted=True, steps=2))
    assert "interrupted Interrupted after step 2 of 3; `--resume` goes on from there." in report(made).text
    change(made, lambda record: record.update(first_step=2))
    assert "It was resumed after step 2." in report(made).text


def test_a_run_that_stopped_early_says_so(made: Path) -> None:
    change(made, lambda record: record["result"].update(stopped_early=True, steps=2))
    assert "Stopped early after step 2 of 3: held-out loss no longer improved." in report(made).text


def test_long_answers_are_shown_first_and_last_and_damaged_lines_are_left_out(made: Path) -> None:
    sample = {"index": 0, "prompt": "Say <b>1</b>", "ended": True}
    lines = [json.dumps({**sample, "step": step, "text": f"answer {step}\n<i>"}) for step in range(20)]
    (made / "samples.jsonl").write_text("\n".join([*lines, "{", "[1]", '{"step": 3}', ""]))
    text = report(made).text
    assert "Say <b>1</b>" in text
    assert "answer 0 <i>" in text
    assert "answer 19 <i>" in text
    assert "answer 5" not in text
    assert "12 answers between the first and the last ones are left out" in text


def test_a_run_that_failed_says_why(made: Path) -> None:
    def fail(record: dict[str, Any]) -> None:
        del record["result"]
        record["failure"] = "Optimizer step 2 is not finite: rows [3]."

    change(made, fail)
    write_metrics(made, metric_lines(made)[:1])
    assert "failed Stopped after step 1 of 3: Optimizer step 2 is not finite: rows [3]." in report(made).text


def test_a_run_without_a_step_or_without_metrics_has_a_page(made: Path) -> None:
    (made / "metrics.jsonl").write_text("")
    assert "No step is recorded." in report(made).text
    (made / "metrics.jsonl").unlink()
    assert "metrics.jsonl is missing: no step can be shown." in report(made).text


def test_a_run_of_one_step_has_its_charts(made: Path) -> None:
    write_metrics(made, metric_lines(made)[:1])
    page = report(made)
    assert page.tags.count("figure") == 6
    assert "NaN" not in (made / "report.html").read_text()


def test_a_torn_last_line_is_left_out_and_said(made: Path) -> None:
    lines = metric_lines(made)
    write_metrics(made, [*lines[:2], lines[-2][:40]], end="")
    assert "The last line of metrics.jsonl is incomplete and left out." in report(made).text


def test_damaged_and_repeated_lines_are_said(made: Path) -> None:
    lines = metric_lines(made)
    write_metrics(
        made, [lines[0], "{", "[]", lines[0], '{"step": true, "loss": 1}', '{"step": 2, "loss": "x"}']
    )
    page = report(made)
    assert "Left out of metrics.jsonl, because they cannot be read: lines 2-3, 5-6." in page.text
    assert "metrics.jsonl has 1 lines for steps that it had before" in page.text


def test_values_that_are_not_finite_are_left_out_of_the_curves_and_said(made: Path) -> None:
    lines = metric_lines(made)
    values = json.loads(lines[0])
    write_metrics(made, [json.dumps({**values, "loss": float("nan")}), *lines[1:]])
    assert "1 values are not finite and left out." in report(made).text


def test_device_memory_is_drawn_against_the_plan(made: Path) -> None:
    lines = [json.dumps({**json.loads(line), "peak_device_bytes": 10**9}) for line in metric_lines(made)]
    write_metrics(made, lines)
    page = report(made)
    assert "Device memory" in page.text
    assert "peak device memory 1.00 GB" in page.text


def test_a_record_of_an_earlier_version_gives_a_page_that_names_what_is_missing(made: Path) -> None:
    def shorten(record: dict[str, Any]) -> None:
        for name in ("config", "data", "predicted_timeline", "first_step"):
            del record[name]
        del record["model"]["receipts"]

    change(made, shorten)
    page = report(made)
    assert "This run recorded no planned timeline." in page.text
    assert "The settings of the run; its config was not recorded" in page.text
    assert page.text.count("Not recorded by the version of Poros that made this run.") == 2


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"plan": 3}'])
def test_a_folder_that_is_no_run_is_refused(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    assert run(["report", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert str(tmp_path) in shown
    assert "Traceback" not in shown
    assert not (tmp_path / "report.html").exists()


def test_no_such_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(tmp_path / "none")]) == 2
    assert "Cannot report: expected the output folder of a run, which holds run.json, got no such folder" in (
        capsys.readouterr().err
    )


def test_output_names_the_page_and_never_replaces_anything_else(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", str(made), "--output", str(tmp_path / "page.html")]) == 0
    assert run(["report", str(made), "--output", str(tmp_path / "page.html")]) == 0
    before = (made / "run.json").read_bytes()
    for bad in (made / "run.json", made, tmp_path / "none" / "page.html"):
        assert run(["report", str(made), "--output", str(bad)]) == 2
        assert "Cannot write the report" in capsys.readouterr().err
    assert (made / "run.json").read_bytes() == before
