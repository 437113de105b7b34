"""Rewrite `[tool.uv] constraint-dependencies` from a fresh resolution of the whole workspace.

`uv.lock` is not committed because it records index addresses, which differ from one mirror to the next; these
constraints are what makes two checkouts install the same versions.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path

CONSTRAINTS = re.compile(r"^constraint-dependencies = \[(?:\]|\n.*?^\])$", re.MULTILINE | re.DOTALL)
NEVER = "sys_platform == 'never'"
RESOLVE = ("uv", "lock", "--quiet", "--upgrade")
EXPORT = (
    *("uv", "export", "--quiet", "--frozen", "--all-packages", "--all-groups"),
    *("--no-hashes", "--no-emit-workspace", "--no-annotate", "--no-header"),
)


def parse_export(text: str) -> list[str]:
    """Return the `name==version[ ; marker]` lines of an export, sorted.

    What only an overridden dependency asks for (the root's ``sys_platform == 'never'``) is never installed: no pin.
    """
    lines = (line.strip() for line in text.splitlines())
    kept = sorted(line for line in lines if line and not line.startswith(("#", "-")) and NEVER not in line)
    if bad := [line for line in kept if "==" not in line.split(";")[0]]:
        raise SystemExit(f"Cannot pin: expected `name==version`, got {bad}. Give these an exact version.")
    return kept


def replace_constraints(pyproject: str, pins: list[str]) -> str:
    """Return the text of a pyproject with its `constraint-dependencies` list replaced by ``pins``."""
    if len(CONSTRAINTS.findall(pyproject)) != 1:
        raise SystemExit(
            "Cannot write pins: expected one `constraint-dependencies = [...]` in pyproject.toml."
        )
    body = "".join(f'  "{pin}",\n' for pin in pins)
    text = f"constraint-dependencies = [\n{body}]" if pins else "constraint-dependencies = []"
    # A function as the replacement: a backslash in a marker is no group reference.
    return CONSTRAINTS.sub(lambda _: text, pyproject)


def resolve(root: Path, run: Callable[..., str]) -> list[str]:
    """Resolve a copy of the workspace without constraints and return its pins."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for source in (root / "pyproject.toml", *root.glob("packages/*/pyproject.toml")):
            target = copy / source.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
        pyproject = copy / "pyproject.toml"
        pyproject.write_text(replace_constraints(pyproject.read_text(), []))
        run(RESOLVE, copy)
        return parse_export(run(EXPORT, copy))


def _run(command: tuple[str, ...], folder: Path) -> str:
    return subprocess.run(command, cwd=folder, check=True, text=True, stdout=subprocess.PIPE).stdout


def main() -> None:
    """Refresh the pins of this workspace and print what changed."""
    root = Path(__file__).resolve().parents[1]
    path = root / "pyproject.toml"
    before = path.read_text()
    pins = resolve(root, _run)
    path.write_text(replace_constraints(before, pins))
    old = set(tomllib.loads(before)["tool"]["uv"]["constraint-dependencies"])
    for pin in sorted(old ^ set(pins)):
        print("-" if pin in old else "+", pin)
    print(f"{len(pins)} pins.")


if __name__ == "__main__":
    main()
