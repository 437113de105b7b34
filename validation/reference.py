"""How far Poros and an unpatched Transformers + PEFT loop are apart: one receipt for this machine's device.

    python validation/reference.py --output validation/receipts --device cpu

On a GPU real block shapes are measured besides the tiny cases, cut to a few blocks that hold every kind.
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
from poros_arch_gemma import parity_cases as gemma_cases
from poros_arch_gemma import real_shapes as gemma
from poros_arch_qwen import parity_cases as qwen_cases
from poros_arch_qwen import real_shapes as qwen

# Shape, architecture, what returns its config, and how many blocks hold every kind.
CUT_SHAPES = (
    ("qwen2.5-7b", "qwen2", qwen.real_config, 4),
    ("qwen3-8b", "qwen3", qwen.real_config, 4),
    ("qwen3.5-27b", "qwen3_5", qwen.real_config, 4),
    ("gemma-3-27b", "gemma3", gemma.real_config, 6),
)


def cases(device: torch.device) -> list[ParityCase]:
    """Return the tiny cases without dropout (two implementations cannot share masks) and, on a GPU, real shapes."""
    tiny = (*qwen_cases.PARITY_CASES, *gemma_cases.PARITY_CASES)
    chosen = [replace(case, lora={**case.lora, "dropout": 0.0}) for case in tiny]
    if device.type == "cuda":
        chosen += [
            ParityCase(
                name=f"{shape}-{num_blocks}-blocks-{dtype}",
                architecture=architecture,
                make_config=partial(real_config, shape, num_blocks),
                compute_dtype=dtype,
                row_lengths=((512,), (475,)),
                lora={"rank": 16, "alpha": 32},
                length_bucket=64,
                loss_chunk_positions=Numerics().loss_chunk_positions,
                loss_chunk_vocabulary=Numerics().loss_chunk_vocabulary,
            )
            for shape, architecture, real_config, num_blocks in CUT_SHAPES
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
