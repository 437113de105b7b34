"""`report_to`, `eval_fraction`, `keep_best` and samples through `poros train`, and their place in `poros report`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from poros_cli.main import run

Train = Callable[..., int]


@pytest.fixture
def train(device: str, model: Path, rows: Path, tmp_path: Path) -> Train:
    """Run `poros train` into ``tmp_path/out``."""

    def trained(*more: str) -> int:
        arguments = ["--model", str(model), "--data", str(rows), "--output", str(tmp_path / "out")]
        return run(["train", *arguments, "--device", device, "--micro-batches", "2", *more])

    return trained


class Writer:
    """Stands in for TensorBoard's writer."""

    made: ClassVar[list[Writer]] = []

    def __init__(self, folder: str, purge_step: int | None = None) -> None:
        self.folder, self.purge_step = folder, purge_step
        self.scalars: dict[str, list[int]] = {}
        self.texts: list[tuple[str, int]] = []
        self.closed = False
        Writer.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.setdefault(name, []).append(step)

    def add_text(self, name: str, text: str, step: int) -> None:
        self.texts.append((name, step))

    def close(self) -> None:
        self.closed = True


class Wandb(ModuleType):
    """Stands in for the package `wandb`."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.api = type("Api", (), {"api_key": None})()
        self.inits: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.finished: list[int] = []

    def Settings(self, **values: Any) -> dict[str, Any]:  # noqa: N802  # the package's name
        return values

    def init(self, **values: Any) -> Any:
        self.inits.append(values)
        return self

    id = "run-id"

    def define_metric(self, *_: Any, **__: Any) -> None: ...

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def finish(self, exit_code: int) -> None:
        self.finished.append(exit_code)


def test_tensorboard_is_told_of_steps_and_evaluations(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    monkeypatch.setattr(Writer, "made", [])
    assert train("--report-to", "tensorboard", "--max-steps", "2", "--eval-fraction", "0.2") == 0
    (writer,) = Writer.made
    assert writer.folder == str(tmp_path / "out" / "tensorboard")
    assert (writer.purge_step, writer.closed) == (None, True)
    assert writer.scalars["train/loss"] == [1, 2]
    assert writer.scalars["eval/loss"] == writer.scalars["eval/perplexity"] == [2]
    constant = ("--set", "optimizer.schedule=constant")
    assert (
        train(
            "--report-to", "tensorboard", "--max-steps", "3", "--eval-fraction", "0.2", "--resume", *constant
        )
        == 0
    )
    assert Writer.made[1].purge_step == 3
    assert "Reporter" not in " ".join(json.loads((tmp_path / "out" / "run.json").read_text())["notes"])


def test_wandb_is_offline_without_a_login_and_goes_on_under_its_id(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert train("--report-to", "wandb", "--max-steps", "1") == 0
    assert (fake.inits[0]["mode"], fake.inits[0]["id"], fake.inits[0]["dir"]) == (
        "offline",
        None,
        str(tmp_path / "out"),
    )
    assert fake.inits[0]["config"]["max_steps"] == 1
    assert fake.logged[0]["train/loss"] > 0
    assert fake.finished == [0]
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert train("--report-to", "wandb", "--max-steps", "2", "--resume") == 0
    assert (fake.inits[1]["mode"], fake.inits[1]["id"], fake.inits[1]["resume"]) == (None, "run-id", "allow")


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_package_is_an_error_before_anything_is_loaded(
    tmp_path: Path,
    name: str,
    module: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    arguments = ["--model", "no-such-model", "--data", "no-such-data", "--output", str(tmp_path / "out")]
    assert run(["train", *arguments, "--device", "cpu", "--report-to", name]) == 2
    error = capsys.readouterr().err
    assert f"Cannot report to `{name}`: expected the package `{name}`, got " in error
    assert f"`uv add 'poros-cli[{name}]'`" in error


def test_an_unknown_reporter_is_refused_with_the_nearest(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--report-to", "tensorbord") == 2
    assert "Did you mean `tensorboard`?" in capsys.readouterr().err


def test_a_held_out_share_is_recorded_and_fixed_for_a_resume(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--max-steps", "1", "--eval-fraction", "0.25") == 0
    shown = capsys.readouterr().out
    assert "held out: 0.25 of the rows, seed 0: 3 rows, 9 to train on" in shown
    assert "perplexity" in shown
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (record["data"]["training"]["num_rows"], record["data"]["held_out"]["num_rows"]) == (9, 3)
    assert train("--max-steps", "2", "--eval-fraction", "0.3", "--resume") == 2
    assert "data.held_out: 0.25 0 " in capsys.readouterr().err
    assert run(["report", str(tmp_path / "out")]) == 0
    assert "held out: 0.25 of the rows, seed 0" in (tmp_path / "out" / "report.html").read_text()


def test_the_output_says_which_adapter_is_saved(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--max-steps", "2", "--eval-fraction", "0.2", "--eval-every", "1", "--keep-best") == 0
    result = json.loads((tmp_path / "out" / "run.json").read_text())["result"]
    assert result["adapter_step"] == result["best_step"]
    shown = capsys.readouterr().out
    assert (
        f"after step {result['best_step']}; the adapter is the one after step {result['adapter_step']}"
        in shown
    )


def test_samples_are_answered_saved_and_shown_in_the_report(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("What is <b>1</b>?\r\n\n  And 2?  \n", encoding="utf-8-sig")
    more = ("--set", f"sample_prompts={prompts}", "--set", "sample_tokens=3", "--set", "sample_every=1")
    assert train("--max-steps", "1", *more) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["prompt"]) for line in lines] == [
        (step, prompt) for step in (0, 1) for prompt in ("What is <b>1</b>?", "And 2?")
    ]
    assert "step 0: sample 1: " in capsys.readouterr().out
    assert run(["report", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<h2>Samples</h2>" in page
    assert "What is &lt;b&gt;1&lt;/b&gt;?" in page


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no-such-file.txt", "No such file or directory (no-such-file.txt)"),
        ("[a, ' ']", "expected text in every prompt, got a blank one"),
    ],
)
def test_prompts_that_cannot_be_used_are_refused_before_the_model_is_opened(
    value: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "none", "--data", "none", "--output", str(tmp_path / "out"), "--device", "cpu"]
    assert run(["train", *arguments, "--set", f"sample_prompts={value}"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("eval_fraction=1.5",), "`eval_fraction`: expected a share between 0 and 1, got 1.5"),
        (("eval_fraction=0.1", "eval_data=x.jsonl"), "`eval_fraction` and `eval_data`: expected at most one"),
        (("keep_best=true",), "`keep_best`: expected `eval_every` beside it"),
        (("early_stop_patience=1",), "`early_stop_patience`: expected `eval_every` beside it"),
        (("early_stop_min_delta=-1.0",), "`early_stop_min_delta`: expected zero or more, got -1.0"),
        (("sample_every=3",), "`sample_every`: expected `sample_prompts` beside it"),
        (("eval_every=3",), "expected `eval_data` beside it, or `eval_fraction`"),
        (("sample_tokens=0",), "`sample_tokens`: expected a positive integer, got 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "m", "--data", "d", "--output", "o"]
    assert run(["train", *arguments, *(f"--set={setting}" for setting in settings)]) == 2
    assert message in capsys.readouterr().err


def test_a_closed_terminal_does_not_end_a_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from poros_cli.output import ProgressReporter

    def broken(self: object, event: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(ProgressReporter, "on_step", broken)
    assert train("--max-steps", "2") == 0
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert "failed in `on_step`: BrokenPipeError" in record["notes"][-1]
