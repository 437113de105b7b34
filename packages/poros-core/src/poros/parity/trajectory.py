"""The recorded states of a run: everything a gate compares, step by step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from poros.bank import GROUPS, AdapterBank, AdapterSignature, AdapterTensor
from poros.determinism import default_generator
from poros.interfaces import MicroBatch
from poros.optimizer import BankOptimizer
from poros.optimizer_8bit import BLOCK_ELEMENTS

__all__ = ["Trajectory"]

SEPARATOR = "/"
# Ends the quantities that hold one number for every `BLOCK_ELEMENTS` elements.
ABSMAX = "_absmax"


@dataclass(slots=True)
class Trajectory:
    """Tensors by (step, quantity, group), on the CPU.

    Attributes:
        tensors: keys ``<step>/<quantity>`` or ``<step>/<quantity>/<group>``; quantities are ``losses``, ``gradients``,
            ``weights``, ``exp_avg``, ``exp_avg_sq``, ``grad_norm``, ``rng`` and ``position``; of 8-bit moments also
            ``exp_avg_absmax`` and ``exp_avg_sq_absmax``; and ``rows`` (a digest of what was read) where the rows are
            not made by the gate itself.
        signatures: the bank's layout, to name an element of a flat tensor.
        kernels: which implementations ran; see `Architecture.kernels`.
    """

    signatures: tuple[AdapterSignature, ...]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    kernels: Mapping[str, str] = field(default_factory=dict)

    def record_gradients(self, step: int, losses: torch.Tensor, bank: AdapterBank) -> None:
        """Record what forward and backward produced, before clipping changes it."""
        self._put(step, "losses", losses)
        for group, gradient in bank.gradients.items():
            self._put(step, "gradients", gradient, group)

    def record_rows(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Record which tokens and labels the step read, as a digest of 32 bytes."""
        digest = hashlib.sha256()
        for batch in micro_batches:
            for tensor in (batch.input_ids, batch.labels, getattr(batch, "position_ids", None)):
                if tensor is None:
                    continue
                digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
                digest.update(tensor.contiguous().numpy().tobytes())
        self._put(step, "rows", torch.tensor(list(digest.digest()), dtype=torch.uint8))

    def digest(self) -> str:
        """Return a sha256 of every recorded byte, with names, dtypes and shapes."""
        whole = hashlib.sha256()
        for key in sorted(self.tensors):
            tensor = self.tensors[key].contiguous()
            whole.update(f"{key}{tensor.dtype}{list(tensor.shape)}".encode())
            whole.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        return whole.hexdigest()

    def record_update(
        self,
        step: int,
        grad_norm: torch.Tensor,
        bank: AdapterBank,
        optimizer: BankOptimizer,
        device: torch.device,
    ) -> None:
        """Record what the optimizer step left: weights, moments, generator state and data position."""
        self._put(step, "grad_norm", grad_norm)
        for group, weights in bank.weights.items():
            self._put(step, "weights", weights, group)
        for quantity in optimizer.quantities:
            for group, value in optimizer.moments(quantity).items():
                self._put(step, quantity, value, group)
        self._put(step, "rng", default_generator(device).get_state())
        self._put(step, "position", torch.tensor(step + 1))

    def _put(self, step: int, quantity: str, value: torch.Tensor, group: str | None = None) -> None:
        key = SEPARATOR.join([str(step), quantity, *([group] if group else [])])
        self.tensors[key] = value.detach().to("cpu", copy=True)

    def from_step(self, first: int) -> Trajectory:
        """Return the part of the trajectory that starts at step ``first``."""
        kept = {k: v for k, v in self.tensors.items() if int(k.split(SEPARATOR)[0]) >= first}
        return Trajectory(self.signatures, kept, self.kernels)

    def finite(self) -> bool:
        """Whether no recorded tensor holds NaN or infinity."""
        return all(bool(torch.isfinite(value).all()) for value in self.tensors.values())

    def save(self, path: Path) -> None:
        """Write the tensors as safetensors; the signatures belong to the case and are not written."""
        save_file(self.tensors, path, dict(self.kernels))

    @classmethod
    def load(cls, path: Path, signatures: tuple[AdapterSignature, ...]) -> Trajectory:
        """Read `save`'s file."""
        with safe_open(path, "pt") as file:
            kernels = file.metadata() or {}
        return cls(signatures, load_file(path), kernels)

    def locate(self, key: str, index: int) -> tuple[int, str, tuple[int, int]] | None:
        """Return (block, LoRA tensor, position in it) of element ``index`` of a flat bank tensor.

        Of a number for several elements it is the first of these.

        None for padding, and for a tensor that is no part of the bank.
        """
        parts = key.split(SEPARATOR)
        if len(parts) < 3:
            return None
        if parts[1].endswith(ABSMAX):
            index *= BLOCK_ELEMENTS
        for block, start, tensor in _elements(self.signatures):
            count = tensor.shape[0] * tensor.shape[1]
            if tensor.group == parts[2] and start <= index < start + count:
                row, column = divmod(index - start, tensor.shape[1])
                return block, f"{tensor.path}.{tensor.group}", (row, column)
        return None

    def describe_element(self, key: str, index: int) -> str:
        """Name element ``index`` of a flat bank tensor: its block, LoRA tensor and position inside it."""
        parts = key.split(SEPARATOR)
        if len(parts) < 3:
            return f"element {index}"
        several = parts[1].endswith(ABSMAX)
        name = f"padding element {index * BLOCK_ELEMENTS if several else index}"
        if (found := self.locate(key, index)) is not None:
            block, tensor, place = found
            name = f"block {block}, tensor {tensor}, index {list(place)}"
        return f"the {BLOCK_ELEMENTS} elements from {name} on" if several else name


def _elements(signatures: tuple[AdapterSignature, ...]) -> Iterator[tuple[int, int, AdapterTensor]]:
    """Yield (block, first element in the group's flat tensor, LoRA tensor)."""
    starts = dict.fromkeys(GROUPS, 0)
    for block, signature in enumerate(signatures):
        for tensor in signature.tensors:
            yield block, starts[tensor.group] + tensor.offset, tensor
        for group in GROUPS:
            starts[group] += signature.row_size(group)
