"""`poros new-arch`: the skeleton is complete, loads, and its own test passes; nothing is overwritten."""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys
import tomllib
from pathlib import Path

import pytest

from poros.plugins import load_registry
from poros_cli import main as cli
from poros_cli.new_arch import write


@pytest.fixture
def skeleton(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A skeleton for Llama."""
    assert cli.run(["new-arch", "llama", "--output", str(tmp_path)]) == 0
    assert "Wrote" in capsys.readouterr().out
    return tmp_path / "poros-arch-llama"


def test_every_file_of_a_distribution_is_there_but_a_licence(skeleton: Path) -> None:
    found = {path.relative_to(skeleton).as_posix() for path in skeleton.rglob("*") if path.is_file()}
    package = "src/poros_arch_llama"
    assert found == {
        "README.md",
        "pyproject.toml",
        f"{package}/__init__.py",
        f"{package}/architectures.py",
        f"{package}/plugin.py",
        f"{package}/py.typed",
        "tests/test_contract.py",
    }


def test_its_entry_point_and_requirements_are_right(skeleton: Path) -> None:
    project = tomllib.loads((skeleton / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["poros"] == {"arch-llama": "poros_arch_llama.plugin"}
    assert project["dependencies"] == ["poros-core>=0.1,<0.2", "poros-quant>=0.1,<0.2"]
    assert "license" not in project


def test_it_loads_and_its_own_test_passes(skeleton: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(skeleton / "src"))
    plugin = importlib.import_module("poros_arch_llama.plugin")
    try:
        registry = load_registry([("arch-llama", "poros-arch-llama", plugin)])
        assert registry.architectures["llama"].distribution == "poros-arch-llama"
        written = runpy.run_path(str(skeleton / "tests" / "test_contract.py"))
        written["test_the_contract_holds"]()
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "poros_arch_llama"]:
            del sys.modules[name]


def test_hyphens_and_underscores_end_up_where_they_may(tmp_path: Path) -> None:
    made = write.write_skeleton("xlm-roberta", tmp_path, load_registry())
    assert (made.distribution, made.package) == ("poros-arch-xlm-roberta", "poros_arch_xlm_roberta")
    assert "class XlmRoberta(" in (made.folder / "src" / made.package / "architectures.py").read_text()


def test_a_second_one_overwrites_nothing(skeleton: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (skeleton / "README.md").write_text("mine")
    assert cli.run(["new-arch", "llama", "--output", str(skeleton.parent)]) == 2
    assert "expected a folder that does not exist yet" in capsys.readouterr().err
    assert (skeleton / "README.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "Bad name of an architecture: expected a `model_type` such as"),
        ("Llama", "lower case letters"),
        ("../llama", "lower case letters"),
        ("poros arch", "lower case letters"),
        ("lama", "that the installed Transformers knows, got `lama`. Did you mean `llama`?"),
        (
            "qwen2",
            "`qwen2` is served already: expected a model type that no loaded plugin serves, got one of",
        ),
    ],
)
def test_a_bad_name_is_refused_and_nothing_is_written(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["new-arch", name, "--output", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.run(["new-arch", "llama", "--output", str(tmp_path / "file" / "deeper")]) == 2
    assert "expected a folder that can be written, got Not a directory" in capsys.readouterr().err


def test_an_import_name_that_is_taken_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert cli.run(["new-arch", "llama", "--output", str(tmp_path)]) == 2
    assert (
        "expected an import name that is free, got `poros_arch_llama`, installed" in capsys.readouterr().err
    )
