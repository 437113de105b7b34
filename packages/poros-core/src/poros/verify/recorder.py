"""Recording a training run step by step, from outside: the trainer, the engine and the optimizer are the real ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from poros.bank import AdapterSignature, AdapterTensor
from poros.engine.engine import Engine, StepOutput
from poros.interfaces import MicroBatch
from poros.optimizer import BankOptimizer
from poros.parity.trajectory import Trajectory

__all__ = ["StepRecorder", "read_signatures", "read_step", "step_bytes"]

SIGNATURES = "signatures.json"


class StepRecorder:
    """Wraps an engine's step and an optimizer's clip and step, and writes one file per optimizer step.

    A step that runs twice (the trainer's warm-up) is recorded as it ran last. Rows, losses and gradients are recorded
    as soon as they exist, so that a run which stops at them leaves them behind.

    Attributes:
        hashes: per finished step, a sha256 of everything that was recorded of it.
    """

    def __init__(self, folder: Path, engine: Engine, optimizer: BankOptimizer) -> None:
        self._folder = folder
        self._engine, self._optimizer = engine, optimizer
        self._engine_step, self._clip, self._update = engine.step, optimizer.clip, optimizer.step
        self._bank = engine.model.bank
        self._index = 0
        self._current: Trajectory | None = None
        self._norm = torch.zeros(())
        self.hashes: dict[int, str] = {}
        engine.step = self._on_step  # type: ignore[method-assign]
        optimizer.clip = self._on_clip  # type: ignore[method-assign]
        optimizer.step = self._on_update  # type: ignore[method-assign]
        signatures = [[asdict(tensor) for tensor in s.tensors] for s in self._bank.signatures]
        (folder / SIGNATURES).write_text(json.dumps(signatures))

    def _on_step(self, micro_batches: Sequence[MicroBatch], step: int) -> StepOutput:
        output = self._engine_step(micro_batches, step)
        self._index = step
        self._current = Trajectory(self._bank.signatures, kernels=self._engine.model.architecture.kernels())
        self._current.record_rows(step, micro_batches)
        self._current.record_gradients(step, torch.stack(output.losses), self._bank)
        return output

    def _on_clip(self) -> torch.Tensor:
        self._norm = self._clip()
        return self._norm

    def _on_update(self) -> None:
        self._update()
        assert self._current is not None
        self._current.record_update(self._index, self._norm, self._bank, self._optimizer, self._engine.device)
        self.hashes[self._index] = self._current.digest()
        self._write()

    def close(self) -> None:
        """Write what was recorded of a step that did not end."""
        if self._current is not None:
            self._write()

    def _write(self) -> None:
        assert self._current is not None
        self._current.save(_step_file(self._folder, self._index))
        self._current = None


def step_bytes(engine: Engine) -> int:
    """Return about how many bytes one recorded step takes: gradients, weights and two moments."""
    return 4 * sum(weights.nbytes for weights in engine.model.bank.weights.values())


def read_signatures(folder: Path) -> tuple[AdapterSignature, ...]:
    """Return the adapters' layout of a recorded run."""
    blocks = json.loads((folder / SIGNATURES).read_text())
    return tuple(
        AdapterSignature(
            tuple(AdapterTensor(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in tensors)
        )
        for tensors in blocks
    )


def read_step(folder: Path, step: int, signatures: tuple[AdapterSignature, ...]) -> Trajectory | None:
    """Return what a run recorded of one step; None if it recorded nothing."""
    file = _step_file(folder, step)
    return Trajectory.load(file, signatures) if file.exists() else None


def _step_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.safetensors"
