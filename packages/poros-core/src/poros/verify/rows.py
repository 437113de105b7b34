"""What a model alone is verified with: rows of random tokens, and random weights where its folder holds none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from poros.bench.source import bench_source
from poros.checkpoint import resolve_model
from poros.engine.targets import IGNORE_INDEX
from poros.errors import ConfigError, explain
from poros.interfaces import MicroBatch
from poros.parity.case_run import RandomBatch
from poros.plugins import Registry
from poros.run.opening import OpenModel, open_model, open_with
from poros.settings import LoraSettings, Numerics

__all__ = ["RandomSteps", "has_weights", "open_any"]

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf")
WEIGHTS_SEED = 20


def has_weights(folder: Path) -> bool:
    """Whether any file in ``folder`` means that weights are meant to be there."""
    return any(True for pattern in WEIGHTS for _ in folder.glob(pattern))


def open_any(
    model: str,
    *,
    quantization: str,
    lora: LoraSettings,
    numerics: Numerics,
    registry: Registry,
    device: torch.device,
) -> tuple[OpenModel, bool]:
    """Open a folder or hub model; a folder without weights gets seeded random ones of its shape.

    Returns:
        The model, and whether its weights are its own.

    Raises:
        ConfigError: ``lora.init_from`` without weights that it could fit.
    """
    local = Path(model).expanduser()
    if not local.is_dir() or has_weights(local):
        opened = open_model(model, quantization=quantization, lora=lora, numerics=numerics, registry=registry)
        return opened, True
    if lora.init_from is not None:
        raise ConfigError(
            explain(
                "Cannot start from an adapter without its base",
                expected="weights in the folder of the model",
                got="a config alone",
                where="lora.init_from",
            )
        )
    opened = open_with(
        lambda meta: (bench_source(meta, WEIGHTS_SEED, device), ()),
        name=model,
        folder=resolve_model(model, config_only=True),
        quantization=quantization,
        lora=lora,
        numerics=numerics,
        registry=registry,
    )
    return opened, False


class RandomSteps:
    """A `poros.interfaces.StepSource` of random tokens: rows of unequal length, right-padded, partly supervised."""

    def __init__(
        self,
        *,
        vocab_size: int,
        num_steps: int,
        micro_batches: int,
        micro_batch_size: int,
        max_length: int,
        length_bucket: int,
        seed: int,
    ) -> None:
        self.num_steps = num_steps
        self.fingerprint = f"random-{seed}-{vocab_size}-{micro_batches}x{micro_batch_size}x{max_length}"
        self._vocab_size, self._seed = vocab_size, seed
        self._micro_batches, self._rows = micro_batches, micro_batch_size
        self._max_length, self._bucket = max_length, length_bucket

    def step(self, index: int) -> Sequence[MicroBatch]:
        """Return the micro-batches of one step; the first row of the first one is the longest."""
        generator = torch.Generator().manual_seed(self._seed * 1000 + index)

        def draw(low: int, high: int) -> int:
            return int(torch.randint(low, high, (1,), generator=generator))

        batches: list[MicroBatch] = []
        for number in range(self._micro_batches):
            lengths = [draw(max(2, self._max_length // 2), self._max_length + 1) for _ in range(self._rows)]
            if number == 0:
                lengths[0] = self._max_length
            width = -(-max(lengths) // self._bucket) * self._bucket
            ids = torch.zeros(self._rows, width, dtype=torch.int64)
            labels = torch.full_like(ids, IGNORE_INDEX)
            for row, length in enumerate(lengths):
                ids[row, :length] = torch.randint(1, self._vocab_size, (length,), generator=generator)
                start = draw(0, max(1, length // 2))
                labels[row, start:length] = ids[row, start:length]
            batches.append(RandomBatch(ids, labels))
        return batches
