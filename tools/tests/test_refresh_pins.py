"""The pins are rewritten whole, keep their markers and touch nothing else."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = """\
[tool.uv]
override-dependencies = ["llm ; sys_platform == 'never'"]
constraint-dependencies = [
  "old==1 ; sys_platform == 'win32'",
  "older==2",
]

[tool.uv.workspace]
members = ["packages/*"]
"""


@pytest.fixture(scope="module")
def refresh_pins() -> ModuleType:
    spec = importlib.util.spec_from_file_location("refresh_pins", ROOT / "tools" / "refresh_pins.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_export_lines_keep_markers_and_lose_comments_and_options(refresh_pins: ModuleType) -> None:
    text = "# made by uv\n-e ./packages/x\nb==2 ; python_full_version < '3.12'\na==1\n"
    assert refresh_pins.parse_export(text) == ["a==1", "b==2 ; python_full_version < '3.12'"]


def test_packages_that_an_override_never_installs_get_no_pin(refresh_pins: ModuleType) -> None:
    assert refresh_pins.parse_export("a==1\nllm==3 ; sys_platform == 'never'\n") == ["a==1"]


def test_a_requirement_without_exact_version_is_refused(refresh_pins: ModuleType) -> None:
    with pytest.raises(SystemExit, match="expected `name==version`"):
        refresh_pins.parse_export("a>=1\n")


def test_replacing_changes_only_the_constraints(refresh_pins: ModuleType) -> None:
    text = refresh_pins.replace_constraints(PYPROJECT, ["a==1", "b==2 ; python_full_version < '3.12'"])
    before, after = tomllib.loads(PYPROJECT), tomllib.loads(text)
    assert after["tool"]["uv"].pop("constraint-dependencies") == [
        "a==1",
        "b==2 ; python_full_version < '3.12'",
    ]
    before["tool"]["uv"].pop("constraint-dependencies")
    assert after == before


def test_emptied_constraints_can_be_filled_again(refresh_pins: ModuleType) -> None:
    empty = refresh_pins.replace_constraints(PYPROJECT, [])
    assert tomllib.loads(empty)["tool"]["uv"]["constraint-dependencies"] == []
    assert '"a==1",' in refresh_pins.replace_constraints(empty, ["a==1"])


def test_a_pyproject_without_constraints_is_refused(refresh_pins: ModuleType) -> None:
    with pytest.raises(SystemExit, match="constraint-dependencies"):
        refresh_pins.replace_constraints("[tool.uv]\n", ["a==1"])


def test_resolution_runs_in_a_copy_without_the_old_pins(refresh_pins: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "packages" / "x").mkdir(parents=True)
    (tmp_path / "packages" / "x" / "pyproject.toml").write_text("[project]\n")
    seen: list[tuple[str, bool]] = []

    def run(command: tuple[str, ...], folder: Path) -> str:
        settings = tomllib.loads((folder / "pyproject.toml").read_text())
        assert settings["tool"]["uv"]["constraint-dependencies"] == []
        seen.append((command[1], (folder / "packages/x/pyproject.toml").exists()))
        return "a==1\n"

    assert refresh_pins.resolve(tmp_path, run) == ["a==1"]
    assert seen == [("lock", True), ("export", True)]


def test_the_workspace_is_pinned() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pinned = {pin.split("==")[0] for pin in settings["tool"]["uv"]["constraint-dependencies"]}
    assert {"torch", "transformers", "peft", "bitsandbytes", "pytest", "gguf"} <= pinned
