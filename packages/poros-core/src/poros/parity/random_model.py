"""Models made for gates: seeded random weights at a config's shapes, every tensor non-zero and different per block.

With Transformers' defaults (biases zero, norms one, lora_B zero) a tensor that is never refreshed would pass.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from poros.bank import AdapterBank
from poros.errors import CheckpointError, explain

__all__ = ["RandomSource", "randomize_adapters", "zero_centred_norms"]

WEIGHT_SCALE = 0.05
BIAS_SCALE = 0.1
NORM_SCALE = 0.1
LORA_B_SCALE = 0.02


def _generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest, "little"))


def zero_centred_norms(model: nn.Module) -> frozenset[str]:
    """Return the names of a (meta) model's norm weights that are added to one: around one they would double it.

    Found by calling each class of norm once with a weight of zeros: only these let anything through.
    """
    answers: dict[type[nn.Module], bool] = {}
    found = set()
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if "norm" not in path.rpartition(".")[2] or weight is None:
            continue
        if type(module) not in answers:
            answers[type(module)] = _passes_with_zero_weight(module, weight.numel())
        if answers[type(module)]:
            found.add(f"{path}.weight")
    return frozenset(found)


@torch.no_grad()
def _passes_with_zero_weight(norm: nn.Module, size: int) -> bool:
    probe = copy.deepcopy(norm).to_empty(device="cpu")
    nn.init.zeros_(probe.get_parameter("weight"))
    row = torch.ones(1, size)
    try:
        return bool(probe(row).any())
    except TypeError:  # a gated norm takes the gate too
        return bool(probe(row, row).any())


class RandomSource:
    """A `TensorSource` that makes every tensor from (seed, name) when it is asked for.

    Args:
        shapes: tensor name to shape.
        seed: of the whole model.
        device: where values are drawn; CPU and GPU generators give different numbers, one device always the same.
        zero_centred: names of norm weights that are added to one; see `zero_centred_norms`.
        factors: multiplies every tensor whose name ends so.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        seed: int,
        device: torch.device,
        zero_centred: Collection[str] = (),
        factors: Mapping[str, float] | None = None,
    ) -> None:
        self._factors = dict(factors or {})
        self._zero_centred = frozenset(zero_centred)
        self._shapes = dict(shapes)
        self._seed = seed
        self._device = device
        self.fingerprint = f"random-{seed}-{device.type}-{sorted(self._factors.items())}"

    def names(self) -> Sequence[str]:
        """See `TensorSource.names`."""
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource.shape`."""
        if name not in self._shapes:
            raise CheckpointError(explain("Missing tensor", expected=f"`{name}`", got="nothing"))
        return self._shapes[name]

    def load(self, name: str, device: torch.device) -> torch.Tensor:
        """Return the tensor in bfloat16: weights around zero, biases, norms and scalars away from their defaults."""
        shape = self._shapes[name]
        generator = _generator(self._seed, name, self._device)
        values = torch.randn(shape, generator=generator, device=self._device, dtype=torch.bfloat16)
        # A single number multiplies something whole: around zero it would silence a block.
        if "norm" in name or math.prod(shape) == 1:
            values = values * NORM_SCALE + (0 if name in self._zero_centred else 1)
        else:
            values = values * (WEIGHT_SCALE if len(shape) > 1 else BIAS_SCALE)
        for ending, factor in self._factors.items():
            if name.endswith(ending):
                values = values * factor
        return values.to(device)


def randomize_adapters(bank: AdapterBank, seed: int) -> None:
    """Give every lora_B non-zero values that differ per block; lora_A keeps PEFT's initialization."""
    device = bank.weights["lora_B"].device
    for block, tensor, view in bank.tensors(bank.weights):
        if tensor.group == "lora_B":
            generator = _generator(seed, f"{block}/{tensor.path}", device)
            view.copy_(torch.randn(view.shape, generator=generator, device=device) * LORA_B_SCALE)
