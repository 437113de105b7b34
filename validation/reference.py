"""How far Poros and an unpatched Transformers + PEFT loop are apart: one receipt for this machine's device.

    python validation/reference.py --output validation/receipts --device cpu

On a GPU the block shapes of Qwen2.5-7B and Qwen3-8B, cut to four blocks, are measured besides the tiny cases.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from poros.determinism import configure
from poros.interfaces import ParityCase
from poros.parity.gates import reference
from poros.parity.receipts import write_receipt
from poros.plugins import load_registry
from poros.settings import Numerics
from poros_arch_qwen.parity_cases import PARITY_CASES
from poros_arch_qwen.real_shapes import real_config

CUT_BLOCKS = 4


def cases(device: torch.device) -> list[ParityCase]:
    """Return the tiny cases without dropout (two implementations cannot share masks) and, on a GPU, real shapes."""
    chosen = [replace(case, lora={**case.lora, "dropout": 0.0}) for case in PARITY_CASES]
    if device.type == "cuda":
        chosen += [
            ParityCase(
                name=f"{shape}-{CUT_BLOCKS}-blocks-{dtype}",
                architecture=architecture,
                make_config=partial(real_config, shape, CUT_BLOCKS),
                compute_dtype=dtype,
                row_lengths=((512,), (475,)),
                lora={"rank": 16, "alpha": 32},
                length_bucket=64,
                loss_chunk_positions=Numerics().loss_chunk_positions,
                loss_chunk_vocabulary=Numerics().loss_chunk_vocabulary,
            )
            for shape, architecture in (("qwen2.5-7b", "qwen2"), ("qwen3-8b", "qwen3"))
            for dtype in (torch.bfloat16, torch.float32)
        ]
    return chosen


def main() -> int:
    """Measure every case and write the receipt."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", required=True)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    configure(device)
    registry = load_registry()
    results = {}
    for case in cases(device):
        found = asdict(reference(case, registry, device))
        results[case.name] = {
            "compute_dtype": str(case.compute_dtype),
            "num_steps": case.num_steps,
            **found,
        }
        print(case.name, found, flush=True)
    write_receipt(
        arguments.output / f"reference-{device.type}.json", device, {"claim": "reference", "results": results}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
