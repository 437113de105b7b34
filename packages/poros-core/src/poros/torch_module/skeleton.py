"""The module tree that PEFT and trainers see: LoRA layers by their usual names around layers without weights.

PEFT's own classes hold the adapters, so names, `save_pretrained`, `disable_adapter` and further adapters are PEFT's.
The frozen weights are not in the tree: they live in the store and are read in visits.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear
from torch import nn

from poros.adapters import ADAPTER, lora_layers
from poros.blocks.kinds import BlockKind
from poros.errors import UserError, explain

__all__ = ["BlockAdapter", "StreamedLinear", "StreamedLoraLinear", "grow_skeleton", "skeleton_lora_config"]


class StreamedLinear(nn.Linear):
    """The place of a frozen linear layer. ``weight`` states shape and device to PEFT, in four bytes.

    Not a parameter: it would be counted, hashed and saved as if it held the model's weights.
    """

    def __init__(self, in_features: int, out_features: int, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.register_parameter("bias", None)
        self.weight: torch.Tensor = torch.zeros((), device=device).expand(out_features, in_features)


class StreamedLoraLinear(Linear):
    """PEFT's LoRA layer as a holder of parameters: blocks run whole, in visits, and never through it."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Refuse: there is no weight here to multiply with."""
        raise UserError(_no_weight("run one layer of a streamed model", "Call the whole model"))

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refuse: the base is immutable."""
        raise UserError(
            _no_weight(
                "merge an adapter into a streamed model",
                "Save the adapter and use `poros merge`, which streams",
            )
        )

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        """Refuse, as `merge` does."""
        self.merge()
        raise AssertionError


def _no_weight(what: str, next_step: str) -> str:
    return explain(
        f"Cannot {what}",
        expected="a layer that holds its weight",
        got="one whose weight lies in the store and comes to the device in visits of its block",
        next_step=next_step,
    )


def skeleton_lora_config(config: LoraConfig, base: str) -> LoraConfig:
    """Return the run's LoRA config for the skeleton of the model called ``base``."""
    config = copy.deepcopy(config)
    config._custom_modules = {StreamedLinear: StreamedLoraLinear}
    config.base_model_name_or_path = base
    return config


def grow_skeleton(root: nn.Module, path: str, blocks: nn.ModuleList, device: torch.device) -> None:
    """Put a place for every adapted linear of the (meta) ``blocks`` at ``path`` below ``root``."""
    *parents, last = path.split(".")
    for name in parents:
        root = _child(root, name)
    places = nn.ModuleList([nn.Module() for _ in blocks])
    setattr(root, last, places)
    for place, block in zip(places, blocks, strict=True):
        for layer_path, layer in lora_layers(block):
            *inner, leaf = layer_path.split(".")
            owner = place
            for name in inner:
                owner = _child(owner, name)
            setattr(owner, leaf, StreamedLinear(layer.in_features, layer.out_features, device))


def _child(module: nn.Module, name: str) -> nn.Module:
    if not hasattr(module, name):
        setattr(module, name, nn.Module())
    child: nn.Module = getattr(module, name)
    return child


class BlockAdapter:
    """The adapter of one block as it stands in the skeleton at the moment.

    Args:
        place: the block's part of the skeleton, after PEFT's injection.
        kind: of the block.
    """

    def __init__(self, place: nn.Module, kind: BlockKind) -> None:
        self._expected = {
            path: (layer.scaling[ADAPTER], layer.r[ADAPTER]) for path, layer in lora_layers(kind.prototype)
        }
        self._layers: list[tuple[str, Any]] = [(path, place.get_submodule(path)) for path in self._expected]
        self._groups = {
            path: [t.group for t in kind.adapter.tensors if t.path == path] for path in self._expected
        }

    def read(self, device: torch.device) -> tuple[list[nn.Parameter], tuple[float, ...]]:
        """Return the active adapter's parameters, A before B per layer, and each layer's dropout; both empty if off.

        Raises:
            UserError: what PEFT was asked for is more than a visit can do.
        """
        if not self._layers:
            return [], ()
        off = {layer.disable_adapters or not layer.active_adapters for _, layer in self._layers}
        if off == {True}:
            return [], ()
        parameters: list[nn.Parameter] = []
        dropouts = []
        for path, layer in self._layers:
            name = self._only_active(path, layer, mixed=len(off) > 1)
            for group in self._groups[path]:
                parameter: nn.Parameter = getattr(layer, group)[name].weight
                if parameter.dtype != torch.float32 or parameter.device != device:
                    got = f"{parameter.dtype} on {parameter.device}"
                    _refuse(
                        path, f"float32 on {device}", got, "Leave out `device_map` and casts of parameters"
                    )
                parameters.append(parameter)
            dropout = layer.lora_dropout[name]
            dropouts.append(dropout.p if isinstance(dropout, nn.Dropout) else 0.0)
        return parameters, tuple(dropouts)

    def _only_active(self, path: str, layer: Any, *, mixed: bool) -> str:
        names: Sequence[str] = layer.active_adapters
        if mixed or len(names) != 1:
            got = "some layers of the block on and some off" if mixed else f"{list(names)} active"
            _refuse(path, "one active adapter for all layers of a block", got)
        (name,) = names
        if hasattr(layer, "_hf_hook"):
            _refuse(path, "no hooks that move weights", "a layer dispatched by accelerate")
        if name not in layer.lora_A:
            _refuse(
                path, "an adapter with the targets that the model was opened with", f"`{name}` without it"
            )
        found = (layer.scaling[name], layer.r[name])
        if found != self._expected[path]:
            expected = "scaling {}, rank {}, as the model was opened with".format(*self._expected[path])
            _refuse(path, expected, "scaling {}, rank {} in `{}`".format(*found, name))
        return name


def _refuse(path: str, expected: str, got: str, next_step: str | None = None) -> None:
    what = "Cannot run this adapter in a streamed model"
    raise UserError(explain(what, expected=expected, got=got, where=path, next_step=next_step))
