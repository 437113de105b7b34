"""Run ``poros verify --inject all`` on a tiny model and keep its receipt, which `docs/guarantees.md` reads.

Run through nox: ``uv run nox -s verify``, on a GPU ``uv run nox -s verify -- --device cuda``.
The exit code is the command's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from poros.plugins import load_registry
from poros.run.device import resolve_device
from poros_cli.main import run

# Five blocks: with two slots every block is refilled in every pass.
CASE = "qwen3-nf4"


def main() -> int:
    """Write the config of a parity case into a folder and verify it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=Path("validation/receipts"))
    arguments = parser.parse_args()
    device = resolve_device(arguments.device)
    config = load_registry().parity_cases()[CASE].value.make_config()
    config.architectures = ["Qwen3ForCausalLM"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / CASE
        config.save_pretrained(folder)
        overrides = (
            f"device={device}",
            "max_length=24",
            "micro_batches=3",
            "lora.rank=4",
            "lora.dropout=0.3",
        )
        overrides = (*overrides, "numerics.length_bucket=8", "numerics.loss_chunk_vocabulary=24")
        receipt = arguments.output / f"verify-{CASE}-{device.type}.json"
        command = ["verify", str(folder), "--inject", "all", "--receipt", str(receipt)]
        command += [word for override in overrides for word in ("--set", override)]
        sys.argv = ["poros", *command]
        return run(command)


if __name__ == "__main__":
    sys.exit(main())
