"""`poros verify`: verdicts, exit codes, faults and the receipt. Most tests run the processes' work in this one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from rich.console import Console

from poros.parity.compare import QUANTITY_ORDER, Difference, Verdict
from poros.verify import judge as judging
from poros.verify.controls import CONTROLS
from poros.verify.side import SideSpec
from poros_cli.main import run
from poros_cli.verify import processes
from poros_cli.verify.processes import Worker
from poros_cli.verify.receipt import without_paths
from poros_cli.verify.run import CANNOT_COMPARE, NEEDS_GPU, Check, ControlOutcome, Verification
from poros_cli.verify.text import KINDS, conclusion, difference_sentence, show_verification
from poros_cli.verify.worker import work

Outcome = Literal["equal", "different", "cannot compare"]
SMALL = ("--set", "lora.rank=4", "--set", "numerics.length_bucket=8", "--set", "device=cpu")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the workers work in this process: importing everything anew takes them most of their time."""

    def start(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        work(json.loads(Path(command[-1]).read_text()))
        return subprocess.CompletedProcess(list(command), 0, "", "")

    monkeypatch.setattr(processes.subprocess, "run", start)


@pytest.fixture
def config(model: Path, rows: Path, tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {model}\ndata: {rows}\noutput: {tmp_path / 'out'}\ndevice: cpu\nmax_length: 40\n"
        "micro_batches: 2\nmax_steps: 6\nlora: {rank: 4, dropout: 0.2}\n"
        "numerics: {compute_dtype: float32, length_bucket: 8}\n"
    )
    return file


@pytest.fixture
def bare(model: Path) -> Path:
    """The model's folder without its weights."""
    for file in model.glob("*.safetensors*"):
        file.unlink()
    return model


@pytest.mark.usefixtures("here")
def test_a_run_is_equal_every_fault_is_caught_and_the_receipt_says_it_all(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "receipts" / "verify.json"
    arguments = ["verify", str(config), "--steps", "3", "--inject", "all", "--receipt", str(file)]
    monkeypatch.setattr("sys.argv", ["poros", *arguments])
    assert run(arguments) == 0
    shown = capsys.readouterr().out
    assert "EQUAL, byte for byte; 5 of 5 faults caught, 3 not tried: these need a GPU." in shown
    receipt = json.loads(file.read_text())
    assert [(check["name"], check["outcome"]) for check in receipt["checks"]] == [
        ("repeatability", "equal"),
        ("residency", "equal"),
        ("restart", "equal"),
    ]
    caught = {control["fault"]: control["caught"] for control in receipt["controls"]}
    assert [name for name, answer in caught.items() if answer] == [
        "early-refill",
        "missing-wait",
        "poisoned-slot",
        "skipped-accumulation",
        "dropped-moment",
    ]
    sides = {side["name"]: side for side in receipt["sides"]}
    assert sides["resident"]["plan"]["residency"] == "resident"
    assert sides["streamed"]["plan"]["residency"] == "streamed"
    assert sides["resident"]["steps"] == sides["streamed"]["steps"]
    assert len(sides["streamed"]["steps"]) == 3
    assert receipt["environment"]["versions"]["torch"]
    assert receipt["fingerprint"]["data.steps"]
    assert str(tmp_path) not in file.read_text()
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("here")
def test_a_model_without_weights_runs_on_random_ones_and_says_so(
    bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--set", "max_length=16", "--steps", "2", *SMALL)
    assert run(["verify", str(bare), *arguments]) == 0
    shown = capsys.readouterr().out
    assert "The folder holds no weights: random ones of its shape are used" in shown
    assert "No config, so no rows: random tokens are used" in shown


CAUGHT, MISSED, UNTRIED = ("equal", "different"), ("equal", "equal"), (NEEDS_GPU, NEEDS_GPU)
UNKNOWN, MISSED_AND_UNKNOWN = ("equal", CANNOT_COMPARE), ("different", CANNOT_COMPARE)


def _found(outcome: Outcome = "equal", got: tuple[str, str] = CAUGHT) -> Verification:
    """A verification with one check and one fault on streams."""
    check = Check(name="residency", what="", sides=("", ""), first=0, last=2, verdict=Verdict(outcome, "", 1))
    control = ControlOutcome(
        control=CONTROLS["side-traffic"],
        expected=("equal", "different"),
        got=got,
        details=() if got == UNTRIED else ("", "its process ended with -9"),
    )
    return Verification(num_steps=2, checks=[check], controls=[control])


@pytest.mark.parametrize(
    ("outcome", "got", "asked", "code", "text"),
    [
        ("equal", CAUGHT, "side-traffic", 0, "EQUAL, byte for byte; 1 of 1 faults caught."),
        ("equal", MISSED, "side-traffic", 1, "EQUAL, byte for byte; 0 of 1 faults caught."),
        (
            *("different", CAUGHT, "all", 1),
            "DIFFERENT: please report this, with the receipt; 1 of 1 faults caught.",
        ),
        ("cannot compare", CAUGHT, "all", 3, "CANNOT COMPARE; 1 of 1 faults caught."),
        ("cannot compare", MISSED, "all", 1, "CANNOT COMPARE; 0 of 1 faults caught."),
        (
            *("equal", UNTRIED, "side-traffic", 3),
            "EQUAL, byte for byte; 0 of 0 faults caught, 1 not tried: these need a GPU.",
        ),
        (
            *("equal", UNTRIED, "all", 0),
            "EQUAL, byte for byte; 0 of 0 faults caught, 1 not tried: these need a GPU.",
        ),
        (
            *("equal", UNKNOWN, "all", 3),
            "EQUAL, byte for byte; 0 of 1 faults caught, 1 could not be compared.",
        ),
        ("equal", MISSED_AND_UNKNOWN, "all", 1, "EQUAL, byte for byte; 0 of 1 faults caught."),
    ],
)
def test_the_exit_code_and_the_last_line_follow_from_checks_and_faults(
    outcome: Outcome, got: tuple[str, str], asked: str, code: int, text: str
) -> None:
    found = _found(outcome, got)
    assert found.exit_code([asked]) == code
    assert conclusion(found) == text


def test_a_fault_that_was_not_tried_is_never_shown_as_passed(capsys: pytest.CaptureFixture[str]) -> None:
    show_verification(_found(got=UNTRIED), Console())
    line = next(line for line in capsys.readouterr().out.splitlines() if "side-traffic" in line)
    assert line.split()[1:] == ["equal,", "then", "different", *NEEDS_GPU.split(), "not", "tried"]


def test_a_fault_that_could_not_be_compared_is_shown_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_verification(_found(got=UNKNOWN), Console(width=200))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if "side-traffic" in line]
    assert lines[0].split()[1:] == [
        "equal,",
        "then",
        "different",
        "equal,",
        "then",
        "cannot",
        "compare",
        "unknown",
    ]
    assert lines[1:] == ["side-traffic: its process ended with -9"]


@pytest.mark.usefixtures("here")
def test_a_difference_says_where_and_exits_1(
    bare: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from poros.verify import side

    real = side._make_trainer

    def other_weights(spec: SideSpec, *rest: Any) -> Any:
        trainer = real(spec, *rest)
        if spec.residency == "resident":
            trainer.model.source._seed = 21
        return trainer

    monkeypatch.setattr(side, "_make_trainer", other_weights)
    assert run(["verify", str(bare), "--set", "max_length=16", "--steps", "2", *SMALL]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "first difference in step 1: loss of micro-batch 1: " in shown
    assert "DIFFERENT" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--inject", "nonsense"), "Unknown fault: expected early-refill"),
        (("--set", "lora.rnak=3"), "Did you mean `lora.rank`?"),
    ],
)
@pytest.mark.usefixtures("here")
def test_bad_input_exits_2_with_one_message(
    arguments: tuple[str, ...], message: str, bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", str(bare), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_process_of_its_own_reports_its_sides(bare: Path, tmp_path: Path) -> None:
    overrides = tuple(value for value in (*SMALL, "max_length=16") if value != "--set")
    result = Worker(str(bare), overrides, tmp_path).run([SideSpec(name="streamed", steps=1)])
    (side,) = result.sides
    assert side["failure"] is None
    assert list(side["steps"]) == ["0"]
    assert result.environment["device"] == "cpu"
    assert (tmp_path / "streamed" / "step-000000.safetensors").exists()


def test_a_process_that_dies_leaves_a_failed_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        job = json.loads(Path(command[-1]).read_text())
        Path(job["result"]).write_text(json.dumps({"said": [], "sides": []}))
        return subprocess.CompletedProcess(list(command), -9, "Killed", "")

    monkeypatch.setattr(processes.subprocess, "run", die)
    (side,) = Worker("model", (), tmp_path).run([SideSpec(name="streamed", steps=1)]).sides
    assert side["failure"] == "its process ended with -9: Killed"
    verdict = judging.judge(tmp_path, side, side, first=0, last=1)
    assert verdict.outcome == "cannot compare"


@pytest.mark.parametrize(
    ("difference", "sentence"),
    [
        (
            Difference(step=1, quantity="losses", index=(2,), values=(1.5, 2.5), count=1, where="element 2"),
            "first difference in step 2: loss of micro-batch 3: 1.5 against 2.5",
        ),
        (
            Difference(
                step=0,
                quantity="exp_avg",
                block=3,
                tensor="mlp.up_proj.lora_A",
                index=(1, 7),
                values=(0.0, -0.0),
                count=4,
                where="somewhere",
            ),
            "first difference in step 1: first moment of block 3, mlp.up_proj.lora_A[1, 7]: 0.0 against -0.0, "
            "4 values differ",
        ),
    ],
)
def test_a_difference_reads_as_a_sentence(difference: Difference, sentence: str) -> None:
    verdict = Verdict("different", str(difference), 1, difference)
    assert difference_sentence(verdict) == sentence


@pytest.mark.parametrize(
    ("text", "shortened"),
    [
        (
            "poros verify /home/me/runs/a.yaml --set data=/data/rows.jsonl",
            "poros verify a.yaml --set data=rows.jsonl",
        ),
        ("not found (/tmp/x/model.safetensors).", "not found (model.safetensors)."),
        ("runs/a.yaml at 3 tokens/s and/or ./b/c", "runs/a.yaml at 3 tokens/s and/or ./b/c"),
    ],
)
def test_a_receipt_keeps_no_absolute_path(text: str, shortened: str) -> None:
    assert without_paths({"text": [text]}) == {"text": [shortened]}


def test_every_recorded_quantity_has_a_name_for_people() -> None:
    assert tuple(KINDS) == QUANTITY_ORDER


def test_a_receipt_writes_what_json_cannot_hold_as_text() -> None:
    assert without_paths([float("nan"), float("inf"), 0.5]) == ["nan", "inf", 0.5]
