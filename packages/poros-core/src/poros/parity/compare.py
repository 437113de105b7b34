"""Comparing two trajectories byte for byte. Equal, different (where first, both values), or cannot compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from poros.parity.trajectory import SEPARATOR, Trajectory

__all__ = ["Difference", "Verdict", "bitwise_equal", "compare"]

# Within one step, the order in which quantities come to exist: the first that differs is nearest to the cause.
QUANTITY_ORDER = (
    "rows",
    "losses",
    "gradients",
    "grad_norm",
    "weights",
    "exp_avg",
    "exp_avg_absmax",
    "exp_avg_sq",
    "exp_avg_sq_absmax",
    "rng",
    "position",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first element in which two runs differ.

    Attributes:
        step: index of the optimizer step, from 0.
        quantity: one of `QUANTITY_ORDER`.
        block, tensor: whose adapter it is; None for what belongs to no block.
        index: position inside ``tensor``, or inside the recorded tensor where there is none.
        values: of the trusted run and of the other one; ``dtype [shape]`` where these differ.
        count: differing elements of the recorded tensor.
        where: block, tensor and index in words; empty where dtype or shape differ.
    """

    step: int
    quantity: str
    block: int | None = None
    tensor: str | None = None
    index: tuple[int, ...] = ()
    values: tuple[Any, Any]
    count: int = 0
    where: str = ""

    def __str__(self) -> str:
        head = f"first difference at step {self.step}, {self.quantity}"
        a, b = self.values
        if not self.where:
            return f"{head}: {a} against {b}"
        return f"{head}, {self.where}: {a!r} against {b!r} ({self.count} differ)"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a gate.

    Attributes:
        outcome: ``equal``, ``different`` or ``cannot compare``.
        detail: for ``different`` the first differing step, quantity, block, tensor, index and both values; for
            ``cannot compare`` the reason; empty for ``equal``.
        num_tensors: how many tensors were compared.
        difference: what ``detail`` says of two runs that differ, in parts.
    """

    outcome: Literal["equal", "different", "cannot compare"]
    detail: str
    num_tensors: int
    difference: Difference | None = None

    @property
    def exit_code(self) -> int:
        """Return 0 for equal, 1 for different, 3 for cannot compare."""
        return {"equal": 0, "different": 1, "cannot compare": 3}[self.outcome]


def bitwise_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same dtype, shape and bytes, and no NaN. (`torch.equal` alone passes -0.0 for 0.0.)"""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_floating_point() and bool(torch.isnan(a).any()):
        return False
    return torch.equal(_as_integers(a), _as_integers(b))


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.contiguous().view(width)


def compare(oracle: Trajectory, candidate: Trajectory) -> Verdict:
    """Compare every recorded tensor of two runs, earliest first."""
    if oracle.signatures != candidate.signatures:
        return Verdict("cannot compare", "the runs have different adapters", 0)
    if oracle.kernels != candidate.kernels:
        changed = [
            f"{name}: {oracle.kernels.get(name)} against {candidate.kernels.get(name)}"
            for name in sorted({*oracle.kernels, *candidate.kernels})
            if oracle.kernels.get(name) != candidate.kernels.get(name)
        ]
        return Verdict("cannot compare", f"the runs used different kernels ({'; '.join(changed)})", 0)
    if oracle.tensors.keys() != candidate.tensors.keys():
        odd = sorted(oracle.tensors.keys() ^ candidate.tensors.keys())
        return Verdict("cannot compare", f"only one run recorded {odd[:4]}", 0)
    if not oracle.tensors:
        return Verdict("cannot compare", "nothing was recorded", 0)
    for key in sorted(oracle.tensors, key=_order):
        a, b = oracle.tensors[key], candidate.tensors[key]
        if not bitwise_equal(a, b):
            difference = _first_difference(key, a, b, oracle)
            return Verdict("different", str(difference), len(oracle.tensors), difference)
    return Verdict("equal", "", len(oracle.tensors))


def _order(key: str) -> tuple[int, int, str]:
    step, quantity, *rest = key.split(SEPARATOR)
    return int(step), QUANTITY_ORDER.index(quantity), "".join(rest)


def _first_difference(key: str, a: torch.Tensor, b: torch.Tensor, oracle: Trajectory) -> Difference:
    step, quantity = key.split(SEPARATOR)[:2]
    if a.dtype != b.dtype or a.shape != b.shape:
        shapes = (f"{a.dtype} {list(a.shape)}", f"{b.dtype} {list(b.shape)}")
        return Difference(step=int(step), quantity=quantity, values=shapes)
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    unequal = _as_integers(flat_a) != _as_integers(flat_b)
    if flat_a.is_floating_point():
        unequal |= torch.isnan(flat_a) | torch.isnan(flat_b)
    index = int(unequal.nonzero()[0])
    block, tensor, place = oracle.locate(key, index) or (None, None, (index,))
    return Difference(
        step=int(step),
        quantity=quantity,
        block=block,
        tensor=tensor,
        index=place,
        values=(flat_a[index].item(), flat_b[index].item()),
        count=int(unequal.sum()),
        where=oracle.describe_element(key, index),
    )
