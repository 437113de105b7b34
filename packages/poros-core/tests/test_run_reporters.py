"""A reporter is told everything, and whatever it does the run goes on with the same bits."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

import poros
from poros.checkpoint import load_run_state, newest_complete
from poros.errors import ConfigError, OutputError, PluginError
from poros.hookspecs import hookimpl
from poros.plugins import Registered, Registry, load_registry
from poros.run import StartEvent, StepEvent
from poros.run.audience import MAX_FAULTS, Audience
from poros.run.reporters import make_reporters

Make = Callable[..., poros.Trainer]
CPU = torch.device("cpu")


class Named(poros.Reporter):
    name: ClassVar[str] = "named"

    def __init__(self, output: Path) -> None:
        self.output = output


class Failing(poros.Reporter):
    """Draws numbers, switches autograd off, writes into the record, and fails."""

    name: ClassVar[str] = "failing"
    calls = 0

    def on_start(self, event: StartEvent) -> None:
        event.record["fingerprint"].clear()  # type: ignore[index]

    def on_step(self, event: StepEvent) -> None:
        self.calls += 1
        torch.manual_seed(5)
        torch.set_grad_enabled(False)
        raise RuntimeError(f"no connection\nat step {event.step}")


def registry_with(*reporters: Any, distribution: str = "their-dist") -> Registry:
    module = ModuleType("theirs")

    def poros_register_reporters() -> list[Any]:
        return list(reporters)

    module.poros_register_reporters = hookimpl(poros_register_reporters)  # type: ignore[attr-defined]
    return load_registry([("theirs", distribution, module)])


def state(output: Path) -> dict[str, torch.Tensor]:
    path, _ = newest_complete(output)
    assert path is not None
    return dict(load_run_state(path).tensors)


def test_a_reporter_that_fails_stops_nothing_and_changes_no_bit(
    make_trainer: Make, make_steps: Any, tmp_path: Path
) -> None:
    steps = make_steps(num_rows=8, accumulation=2, epochs=1)
    for name in ("plain", "failing"):
        torch.manual_seed(0)
        failing = Failing()
        reporters = (Registered(failing, "their-dist"),) if name == "failing" else ()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with make_trainer(tmp_path / name, steps=steps, reporters=reporters) as trainer:
                assert trainer.run().steps == 4
    assert torch.is_grad_enabled()
    assert failing.calls == MAX_FAULTS
    expected = [
        "Reporter `failing` of distribution `their-dist` failed in `on_step`: RuntimeError: no connection at step 1. "
        "Training goes on; after 3 faults it is no longer called.",
        "Reporter `failing` of distribution `their-dist` failed 3 times and is no longer called.",
    ]
    assert [str(w.message) for w in said if w.category is UserWarning] == expected
    record = json.loads((tmp_path / "failing" / "run.json").read_text())
    assert record["notes"][-2:] == expected
    assert record["fingerprint"]["seed"] == 0
    plain, failed = state(tmp_path / "plain"), state(tmp_path / "failing")
    assert set(plain) == set(failed)
    assert all(torch.equal(plain[name], failed[name]) for name in plain)


def test_faults_are_in_the_record_before_the_run_ends(
    make_trainer: Make, make_steps: Any, tmp_path: Path
) -> None:
    class Stopping(poros.Reporter):
        def on_step(self, event: StepEvent) -> None:
            if event.step == 2:
                notes.extend(json.loads((tmp_path / "run.json").read_text())["notes"])

    notes: list[str] = []
    steps = make_steps(num_rows=3, accumulation=1, epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with make_trainer(tmp_path, steps=steps, reporters=(Failing(), Stopping())) as trainer:
            trainer.run()
    assert any("Failing` failed in `on_step`" in note for note in notes)


def test_a_fault_is_a_note_where_warnings_are_errors() -> None:
    audience = Audience((), (Failing(),), CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        audience.tell("on_close")
        audience.tell("on_step", None)
    assert len(audience.notes) == 1


@pytest.mark.parametrize("error", [RuntimeError("x"), SystemExit(3), OutputError("full"), MemoryError()])
def test_no_kind_of_exception_of_a_reporter_goes_on(error: BaseException) -> None:
    class Raising(poros.Reporter):
        def on_load(self, done: int, total: int) -> None:
            raise error

    audience = Audience((), (Raising(),), CPU)
    with pytest.warns(UserWarning, match=type(error).__name__):
        audience.tell("on_load", 1, 2)


def test_a_second_ctrl_c_inside_a_reporter_ends_the_run() -> None:
    class Raising(poros.Reporter):
        def on_load(self, done: int, total: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Audience((), (Raising(),), CPU).tell("on_load", 1, 2)


def test_the_runs_own_record_may_not_fail() -> None:
    class Full(poros.Reporter):
        def on_load(self, done: int, total: int) -> None:
            raise OutputError("disk full")

    with pytest.raises(OutputError, match="disk full"):
        Audience((Full(),), (), CPU).tell("on_load", 1, 2)


def test_a_failed_reporter_is_still_closed() -> None:
    closed = []

    class Closing(Failing):
        def on_close(self) -> None:
            closed.append(True)

    audience = Audience((), (Closing(),), CPU)
    event = StepEvent.__new__(StepEvent)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(MAX_FAULTS + 2):
            audience.tell("on_step", event)
    audience.tell("on_close")
    assert closed == [True]


def test_named_reporters_are_made_with_the_output_folder_and_know_their_distribution(tmp_path: Path) -> None:
    (made,) = make_reporters(("named",), registry_with(Named), tmp_path)
    assert made.distribution == "their-dist"
    assert isinstance(made.value, Named)
    assert made.value.output == tmp_path


def test_an_unknown_reporter_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`report_to`: expected names among .*named.*Did you mean `named`"):
        make_reporters(("nmaed",), registry_with(Named), tmp_path)


def test_an_unknown_reporter_may_be_one_that_was_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POROS_PLUGINS", "quant")
    with pytest.raises(ConfigError, match="or add it to `POROS_PLUGINS`"):
        make_reporters(("tensorboard",), registry_with(Named), tmp_path)


def test_a_reporter_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="each name once"):
        make_reporters(("named", "named"), registry_with(Named), tmp_path)


def test_a_method_that_nothing_calls_is_refused(tmp_path: Path) -> None:
    class Misspelt(Named):
        def on_steps(self, event: StepEvent) -> None: ...

    with pytest.raises(PluginError, match=r"`their-dist` has a method `on_steps`.*nearest is `on_step`"):
        make_reporters(("named",), registry_with(Misspelt), tmp_path)


@pytest.mark.parametrize("entry", ["../elsewhere", "a/b", "..", ""])
def test_a_reporter_owns_nothing_outside_the_output_folder(tmp_path: Path, entry: str) -> None:
    class Greedy(Named):
        owned: ClassVar[tuple[str, ...]] = (entry,)

    with pytest.raises(PluginError, match="expected the name of an entry"):
        make_reporters(("named",), registry_with(Greedy), tmp_path)


def test_a_reporter_that_cannot_be_made_names_its_distribution(tmp_path: Path) -> None:
    class Broken(Named):
        def __init__(self, output: Path) -> None:
            raise OSError("no such host")

    with pytest.raises(
        PluginError, match="`named` of distribution `their-dist` cannot be made: OSError: no such"
    ):
        make_reporters(("named",), registry_with(Broken), tmp_path)


def test_what_a_reporter_refuses_itself_reaches_the_user_as_it_is(tmp_path: Path) -> None:
    class Particular(Named):
        def __init__(self, output: Path) -> None:
            raise ConfigError("Needs a package.")

    with pytest.raises(ConfigError, match=r"^Needs a package\.$"):
        make_reporters(("named",), registry_with(Particular), tmp_path)


@pytest.mark.parametrize("value", [3, dict, type("Nameless", (poros.Reporter,), {})])
def test_a_hook_that_returns_no_reporter_class_names_its_distribution(value: object) -> None:
    with pytest.raises(PluginError, match="`their-dist` failed: expected a sequence of reporters"):
        registry_with(value).reporters()


def test_overwrite_removes_what_reporters_wrote(make_trainer: Make, make_steps: Any, tmp_path: Path) -> None:
    class Owner(poros.Reporter):
        owned: ClassVar[tuple[str, ...]] = ("theirs",)

    (tmp_path / "theirs").mkdir()
    (tmp_path / "mine").mkdir()
    steps = make_steps(num_rows=1, accumulation=1, epochs=1)
    with make_trainer(tmp_path, steps=steps, reporters=(Owner(),), overwrite=True) as trainer:
        trainer.run()
    assert not (tmp_path / "theirs").exists()
    assert (tmp_path / "mine").exists()
