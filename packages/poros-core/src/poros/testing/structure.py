"""Clauses about what can be said without computing: registration, parts of the model, LoRA targets."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poros.adapters import matched_blocks
from poros.architecture import blockwise_arch_check
from poros.interfaces import Architecture
from poros.parity.case_run import case_meta
from poros.parity.gates import Oracles
from poros.plugins import Registry
from poros.testing.subject import Subject, broken

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["check_parts", "check_registration", "check_targets"]

# The residency clause streams through three slots: with fewer blocks nothing would ever be copied twice.
MIN_BLOCKS = 4


def check_registration(plugin: Any, config: PreTrainedConfig, registry: Registry) -> Architecture:
    """Return the architecture that serves the config, if the plugin registered it and the gate lets it pass."""
    mine = list(plugin.poros_register_architectures())
    model_type = config.model_type
    registered = registry.architecture_for(model_type)
    if registered is None or registered.value not in mine:
        served = sorted(t for a in mine for t in a.model_types)
        raise broken(
            "The plugin does not serve its own config",
            expected=f"`{model_type}` among the `model_types` of the architectures that it registers",
            got=served,
        )
    chosen = registered.value
    for name, kind in (("name", str), ("model_types", tuple), ("default_targets", tuple)):
        value = getattr(chosen, name, None)
        if not isinstance(value, kind) or not value:
            raise broken(
                f"`{chosen.__name__}.{name}` is not stated",
                expected=f"a non-empty {kind.__name__}",
                got=repr(value),
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a third party's architecture always warns
        return blockwise_arch_check(config, registry).architecture


def check_parts(subject: Subject) -> None:
    """Every part of the model lies where `Architecture.parts` says, and `build` takes no memory."""
    off_meta = [name for name, p in subject.built.named_parameters() if p.device.type != "meta"]
    if off_meta:
        raise broken(
            "`build` allocates memory", expected="every parameter on the meta device", got=off_meta[:3]
        )
    parts, stock = subject.parts, subject.stock
    found: dict[str, nn.Module] = {}
    for role in ("blocks", "embedding", "final_norm", "head"):
        path = getattr(parts, role)
        try:
            found[role] = stock.get_submodule(path)
        except AttributeError as error:
            top = [name for name, _ in stock.named_modules() if name.count(".") <= 1 and name]
            raise broken(
                f"`parts().{role}` names no module of {type(stock).__name__}",
                expected=f"a path such as {top[:8]}",
                got=f"`{path}`",
            ) from error
    blocks = found["blocks"]
    num_blocks = subject.text_config.num_hidden_layers
    if not isinstance(blocks, nn.ModuleList) or len(blocks) != num_blocks:
        got = f"{type(blocks).__name__} of {len(list(blocks.children()))} modules"
        raise broken(
            "`parts().blocks` are not the decoder layers", expected=f"a ModuleList of {num_blocks}", got=got
        )
    if num_blocks < MIN_BLOCKS:
        raise broken(
            "The tiny config is too shallow to show streaming",
            expected=f"{MIN_BLOCKS} blocks or more",
            got=num_blocks,
            where="num_hidden_layers",
        )
    vocabulary = (subject.text_config.vocab_size, subject.text_config.hidden_size)
    for role in ("embedding", "head"):
        weight = getattr(found[role], "weight", None)
        shape = tuple(weight.shape) if isinstance(weight, torch.Tensor) else None
        if shape != vocabulary:
            raise broken(
                f"`parts().{role}` has no vocabulary matrix", expected=f"a weight of {vocabulary}", got=shape
            )
    tied = found["head"].weight is found["embedding"].weight
    if parts.tied != tied:
        raise broken(
            "`parts().tied` is not what Transformers does",
            expected=tied,
            got=parts.tied,
            where="is the head's weight the embedding's?",
        )


def check_targets(subject: Subject, _: Oracles) -> None:
    """The default targets reach every block, and none of them names nothing."""
    meta = case_meta(subject.case, subject.registry)[0]
    counts = matched_blocks(meta.blocks, meta.targets)
    blocks_of = {index for found in counts.values() for index in found}
    bare = sorted(set(range(len(meta.blocks))) - blocks_of)
    if bare:
        leaves = sorted(
            {
                name.rpartition(".")[2]
                for name, module in subject.blocks[bare[0]].named_modules()
                if isinstance(module, nn.Linear)
            }
        )
        kind = subject.architecture.layer_type(subject.text_config, bare[0])
        raise broken(
            "`default_targets` leave blocks without an adapter",
            expected=f"one of {leaves} among them",
            got=f"no adapter in blocks {bare}",
            where=f"block {bare[0]}, layer type `{kind}`",
        )
