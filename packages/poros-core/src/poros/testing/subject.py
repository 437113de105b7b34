"""What the kit examines: one architecture of a plugin, a tiny config, and Transformers' own model of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from poros.errors import PorosError, explain
from poros.interfaces import Architecture, ModelParts, ParityCase
from poros.parity.random_model import RandomSource
from poros.plugins import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["ContractError", "Subject", "broken", "stock_model"]

MODEL_SEED = 31
CPU = torch.device("cpu")


class ContractError(PorosError, AssertionError):
    """An architecture breaks its contract; each broken clause is named with what it expected and got."""


def broken(what: str, *, expected: object, got: object, where: str | None = None) -> ContractError:
    """Return the error of a clause that does not hold."""
    return ContractError(explain(what, expected=expected, got=got, where=where))


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """One architecture on one tiny config.

    Attributes:
        registry: the loaded plugins, the examined one among them.
        architecture: the instance that serves the config.
        make_config: builds a fresh config.
        built: what `Architecture.build` returned, on the meta device.
        parts: what `Architecture.parts` returned.
        stock: Transformers' own model of the same class, float32 on the CPU, with random weights.
        case: how the training clauses train it.
    """

    registry: Registry
    architecture: Architecture
    make_config: Callable[[], PreTrainedConfig]
    built: nn.Module
    parts: ModelParts
    stock: nn.Module
    case: ParityCase

    @property
    def text_config(self) -> PreTrainedConfig:
        """The config of the text model, also where another one wraps it: what the architecture's methods get."""
        config: PreTrainedConfig = self.make_config().get_text_config()
        return config

    @property
    def blocks(self) -> nn.ModuleList:
        """The stock model's decoder layers."""
        return self.stock.get_submodule(self.parts.blocks)  # type: ignore[return-value]


def stock_model(built: nn.Module) -> nn.Module:
    """Return a float32 model of ``built``'s class with random weights, every tensor non-zero and unlike the others."""
    stock: nn.Module = type(built)(built.config).float().eval().requires_grad_(False)
    state = {name: tensor for name, tensor in stock.state_dict().items() if tensor.is_floating_point()}
    source = RandomSource({name: tuple(tensor.shape) for name, tensor in state.items()}, MODEL_SEED, CPU)
    for name, tensor in state.items():
        tensor.copy_(source.load(name, CPU))
    return stock
