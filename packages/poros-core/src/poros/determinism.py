"""Seeds and deterministic algorithms.

Every random draw of a run comes from a hash of what it is for, never from how many draws came before it: any order of
execution, any recompute and any resume sees the same values.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator

import torch

__all__ = ["configure", "default_generator", "embedding_seed", "preserved_generator", "visit_seed"]

SEED_BYTES = 4  # the CPU generator keeps only the low 32 bits of a seed


def configure(device: torch.device) -> None:
    """Pin what could pick another kernel or another order of sums in a second run.

    Must run before the first cuBLAS call of the process.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Placement, not bits: segments that grow leave fewer holes.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    torch.use_deterministic_algorithms(True)
    # Deterministic mode fills every new allocation with NaN as a debugging aid; the gates poison what matters
    # themselves, and the step loop must not pay for it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cudnn.benchmark = False


def visit_seed(run_seed: int, step: int, micro_batch: int, block: int) -> int:
    """Return the 32-bit seed of one visit of one micro-batch; the same for forward and recompute."""
    return _seed(f"{run_seed}/{step}/{micro_batch}/{block}")


def embedding_seed(run_seed: int, step: int, micro_batch: int) -> int:
    """Return the 32-bit seed of what is drawn for a micro-batch before it enters block 0."""
    return _seed(f"{run_seed}/{step}/{micro_batch}/embedding")


def _seed(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=SEED_BYTES).digest(), "little")


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that dropout draws from on ``device``."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


@contextlib.contextmanager
def preserved_generator(device: torch.device) -> Iterator[torch.Generator]:
    """Lend the default generator of ``device`` and put its state back afterwards."""
    generator = default_generator(device)
    state = generator.get_state()
    try:
        yield generator
    finally:
        generator.set_state(state)
