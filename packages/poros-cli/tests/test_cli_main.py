"""What reaches the user: one message on stderr, no traceback, the right exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import click
import pytest

from poros import plugins
from poros.errors import CannotCompareError, NonFiniteError, PluginError, UserError
from poros.hookspecs import hookimpl
from poros_cli import main as cli


class ForeignError(ValueError):
    """An error of a package that knows nothing of Poros, such as poros-data."""

    exit_code = 2


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Register `go`, a command of a third party, beside the installed plugins."""

    def register(body: Callable[[], Any]) -> None:
        plugin = ModuleType("third_party")
        plugin.poros_register_commands = hookimpl(lambda: [click.Command("go", callback=body)])  # type: ignore[attr-defined]
        load = plugins.load_plugins
        monkeypatch.setattr(plugins, "load_plugins", lambda: load([("go", "third-party", plugin)]))

    monkeypatch.delenv("POROS_DEBUG", raising=False)
    return register


def raising(error: BaseException) -> Callable[[], None]:
    def body() -> None:
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("wrong"), 2),
        (ForeignError("wrong"), 2),
        (NonFiniteError("wrong"), 1),
        (CannotCompareError("wrong"), 3),
    ],
)
def test_errors_raised_on_purpose_are_one_line_with_their_exit_code(
    error: Exception, code: int, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command(raising(error))
    assert cli.run(["go"]) == code
    assert capsys.readouterr() == ("", "Error: wrong\n")


def test_unexpected_error_is_one_line_that_names_the_debug_variable(
    command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command(raising(ZeroDivisionError("oops")))
    assert cli.run(["go"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Unexpected error: ZeroDivisionError: oops. `POROS_DEBUG=1`")
    assert err.count("\n") == 1


@pytest.mark.parametrize("error", [UserError("wrong"), ZeroDivisionError("oops")])
def test_debug_variable_shows_the_traceback(
    error: Exception, command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POROS_DEBUG", "1")
    command(raising(error))
    assert cli.run(["go"]) == getattr(error, "exit_code", 1)
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_interruption_exits_130(
    error: BaseException, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command(raising(error))
    assert cli.run(["go"]) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


def test_command_chooses_its_exit_code(command: Any) -> None:
    command(raising(click.exceptions.Exit(3)))
    assert cli.run(["go"]) == 3


def test_value_returned_by_a_command_is_no_exit_code(command: Any) -> None:
    command(lambda: 7)
    assert cli.run(["go"]) == 0


def test_registry_reaches_the_command(command: Any) -> None:
    seen: list[Any] = []
    command(lambda: seen.append(click.get_current_context().obj))
    assert cli.run(["go"]) == 0
    assert isinstance(seen[0], plugins.Registry)


def test_usage_error_exits_2(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    command(lambda: None)
    assert cli.run(["go", "--nope"]) == 2
    assert "No such option" in capsys.readouterr().err


def test_built_in_commands_come_through_the_hook() -> None:
    assert {"check", "doctor", "quickstart", "train"} <= set(plugins.load_registry().commands())


def test_broken_plugin_is_one_clear_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        plugins, "load_plugins", raising(PluginError("Plugin `x` of distribution `y` failed"))
    )
    assert cli.run(["train"]) == 2
    assert capsys.readouterr().err == "Error: Plugin `x` of distribution `y` failed\n"


def test_doctor_works_beside_a_broken_plugin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        plugins, "load_plugins", raising(PluginError("Plugin `x` of distribution `y` failed"))
    )
    seen: list[Any] = []
    stub = click.Command("doctor", callback=lambda: seen.append(click.get_current_context().obj))
    monkeypatch.setitem(sys.modules, "poros_cli.commands.doctor", SimpleNamespace(doctor=stub))
    assert cli.run(["doctor"]) == 0
    assert isinstance(seen[0], PluginError)


def test_unknown_command_mentions_limited_plugins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POROS_PLUGINS", "quant")
    assert cli.run(["train"]) == 2
    assert "`POROS_PLUGINS=quant` limits the plugins" in capsys.readouterr().err


QUICK = """
import atexit, sys
from poros_cli import main
slow = ("torch", "transformers", "peft", "datasets", "bitsandbytes", "numpy", "pyarrow")
atexit.register(lambda: print("loaded", [name for name in slow if name in sys.modules], file=sys.stderr))
main.main()
"""


def poros(*arguments: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own; its last line on stderr names the slow libraries that it imported."""
    command = [sys.executable, "-c", QUICK, *arguments]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)


def test_closed_pipe_is_quiet() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = poros("--help", stdout=write_end)
    os.close(write_end)
    assert done.stderr == "loaded []\n"
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "Fine-tune LoRA adapters"),
        (["--version"], 0, "poros, version"),
        (["train", "--help"], 0, "[default: 1024]"),
        (["data", "preview", "--help"], 0, "truncate-left"),
        (["config", "init", "new.yaml"], 0, "Wrote new.yaml"),
        (["nope"], 2, "No such command 'nope'"),
        (["train", "--nope"], 2, "No such option '--nope'"),
        (["check"], 2, "Missing argument 'MODEL'"),
        (["train", "--set", "lora.rang=8"], 2, "Did you mean `lora.rank`?"),
        (["train", "absent.yaml"], 2, "Cannot read the config"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_needs_no_model_is_answered_without_slow_libraries(
    arguments: list[str], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = poros(*arguments)
    assert said in done.stdout + done.stderr
    assert done.stderr.splitlines()[-1] == "loaded []"
    assert done.returncode == code


BARS = """
from poros_cli import main

def bars(arguments):
    from huggingface_hub.utils import tqdm as hub
    from tqdm.auto import tqdm
    from transformers.utils import logging

    for bar in (hub, tqdm, logging.tqdm):
        list(bar(range(3)))
    return 0

main.run = bars
main.main()
"""


def test_bars_of_libraries_stay_out_of_a_pipe() -> None:
    done = subprocess.run([sys.executable, "-c", BARS], stderr=subprocess.PIPE, check=True)
    assert done.stderr == b""


@pytest.mark.skipif(sys.platform == "win32", reason="pty is for Unix")
def test_bars_of_libraries_are_shown_on_a_terminal() -> None:
    import pty
    import termios

    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 80))
    subprocess.run([sys.executable, "-c", BARS], stderr=end, check=True)
    os.close(end)
    shown = os.read(terminal, 10_000)
    os.close(terminal)
    assert shown.count(b"3/3") >= 3
