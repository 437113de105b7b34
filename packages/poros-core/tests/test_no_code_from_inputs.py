"""No source of Poros can run what an input brings: no pickle, no `eval`, no code that ships with a model."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = Path(__file__).resolve().parents[2]
SOURCES = sorted(PACKAGES.glob("*/src/**/*.py"))
# Modules that unpickle or run texts.
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "runpy", "code", "imp"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
# (what it is called on, or "" for any) -> methods that unpickle, run a shell or build arbitrary objects.
CALLS = {
    "torch": {"load"},
    "np": {"load"},
    "numpy": {"load"},
    "os": {"system", "popen", "execv", "execve", "execvp"},
    "yaml": {"load", "load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all"},
}


def _offences(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        yield from (f"import {name}" for name in names if name.partition(".")[0] in MODULES)
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Name(id=name) if name in BUILTINS:
                yield f"{name}()"
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if name in CALLS.get(owner, ()):
                yield f"{owner}.{name}()"
        for keyword in node.keywords:
            constant = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if keyword.arg == "trust_remote_code" and constant is not False:
                yield "trust_remote_code"
            if (keyword.arg, constant) in (("shell", True), ("weights_only", False), ("allow_pickle", True)):
                yield f"{keyword.arg}={constant}"


def test_there_are_sources_to_look_at() -> None:
    assert len(SOURCES) > 100


@pytest.mark.parametrize("package", sorted({path.relative_to(PACKAGES).parts[0] for path in SOURCES}))
def test_no_source_can_execute_what_it_reads(package: str) -> None:
    found = {
        f"{path.relative_to(PACKAGES)}: {offence}"
        for path in SOURCES
        if path.relative_to(PACKAGES).parts[0] == package
        for offence in _offences(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == set()


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load('x', weights_only=True)",
        "eval('1')",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=flag)",
        "subprocess.run('x', shell=True)",
    ],
)
def test_each_offence_would_be_found(text: str) -> None:
    assert list(_offences(ast.parse(text)))
