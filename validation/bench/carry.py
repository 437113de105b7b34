"""Gather the wheels that a GPU machine without a package index needs for the bench, small enough to be sent there.

    uv run python validation/bench/carry.py --output .whl --peers

Wheels are repacked without what the measured code never touches: `bitsandbytes` keeps the libraries of one CUDA
version, Unsloth leaves its studio behind. Everything that torch and Transformers bring along is expected to be there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

POROS_NEEDS = ("bitsandbytes==0.50.2", "peft==0.21.2", "pluggy==1.7.0", "psutil==7.2.2", "accelerate==1.15.0")
PEER_NEEDS = (
    "unsloth==2026.10.9",
    "unsloth_zoo==2026.10.9",
    "trl==1.15.0",
    "torchao==0.18.0",
    "cut_cross_entropy==25.1.1",
    "einops==0.8.2",
    "msgspec==0.23.0",
    "protobuf",
    "tyro==1.0.17",
    "docstring_parser==0.18.0",
    "shtab==1.13.0",
    "typeguard==4.6.1",
    "hf_transfer==0.1.9",
    "structlog==26.1.0",
    "json5==0.17.3",
    "nest-asyncio==1.6.0",
    "soup-cli==0.77.0",
    "rich==15.0.0",
    "markdown-it-py==4.3.0",
    "mdurl==0.1.2",
    "pygments==2.21.0",
)
PLATFORMS = (
    "manylinux_2_28",
    "manylinux_2_27",
    "manylinux_2_24",
    "manylinux_2_17",
    "manylinux2014",
    "manylinux1",
)


def wanted(cuda: str) -> dict[str, Callable[[str], bool]]:
    """Return, per distribution that is repacked, which of its files are kept."""
    libraries = (f"libbitsandbytes_cuda{cuda}.so", "libbitsandbytes_cpu.so")
    return {
        "bitsandbytes": lambda name: not name.endswith(".so") or name.endswith(libraries),
        "unsloth": lambda name: not name.startswith(("studio/", "unsloth_cli/")),
    }


def download(needs: tuple[str, ...], folder: Path, python: str) -> None:
    """Fetch one wheel per requirement for x86-64 Linux, without its own requirements."""
    platforms = [part for name in PLATFORMS for part in ("--platform", f"{name}_x86_64")]
    subprocess.run(
        [
            *(
                "uv",
                "run",
                "--no-project",
                "--quiet",
                "--with",
                "pip",
                "python",
                "-m",
                "pip",
                "download",
                "-q",
            ),
            *("--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python),
            *platforms,
            *("-d", str(folder), *needs),
        ],
        check=True,
    )


def repack(wheel: Path, target: Path, keep: Callable[[str], bool]) -> None:
    """Write a copy of a wheel that holds only the files that ``keep`` names, its record adjusted."""
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as copy:
        for item in source.infolist():
            if not keep(item.filename):
                continue
            data = source.read(item)
            if item.filename.endswith(".dist-info/RECORD"):
                lines = data.decode().splitlines(keepends=True)
                data = "".join(line for line in lines if keep(line.split(",")[0])).encode()
            copy.writestr(item, data)


def main() -> int:
    """Download, repack, build Poros's own wheels, say how much it is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--peers", action="store_true", help="Unsloth and Soup too")
    parser.add_argument("--cuda", default="130", help="whose bitsandbytes library is kept (default: 130)")
    parser.add_argument("--python", default="3.12", help="of the GPU machine (default: 3.12)")
    arguments = parser.parse_args()
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    for old in output.glob("*.whl"):
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        download(POROS_NEEDS + (PEER_NEEDS if arguments.peers else ()), Path(folder), arguments.python)
        keeps = wanted(arguments.cuda)
        for wheel in sorted(Path(folder).glob("*.whl")):
            keep = keeps.get(wheel.name.split("-")[0])
            if keep is None:
                (output / wheel.name).write_bytes(wheel.read_bytes())
            else:
                repack(wheel, output / wheel.name, keep)
    subprocess.run(["uv", "build", "--all-packages", "--wheel", "-q", "-o", str(output)], check=True)
    (output / ".gitignore").unlink(missing_ok=True)
    total = sum(path.stat().st_size for path in output.glob("*.whl"))
    print(f"{len(list(output.glob('*.whl')))} wheels, {total / 2**20:.1f} MiB in {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
