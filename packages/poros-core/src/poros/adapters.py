"""LoRA through PEFT's own config and injection, on a model that holds no weights.

The full model is built and injected once on the meta device: what PEFT decides there (targets, ranks, scalings,
dropout) is read off it, block by block. The trained tensors live in a flat bank (`poros.bank`).
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from poros.blocks.frozen_linear import FrozenLinear
from poros.blocks.lora_linear import FrozenLoraLinear
from poros.interfaces import ModelParts, WeightFormat
from poros.settings import LoraSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "ADAPTER",
    "for_wrapper",
    "freeze_linears",
    "initial_weights",
    "inject",
    "lora_layers",
    "make_lora_config",
    "matched_blocks",
]

ADAPTER = "default"


def freeze_linears(block: nn.Module, weight_format: WeightFormat, compute_dtype: torch.dtype) -> None:
    """Replace every `nn.Linear` of a meta block by the format's `FrozenLinear`, in place."""
    for parent in list(block.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                frozen = weight_format.linear(
                    child.in_features,
                    child.out_features,
                    bias=child.bias is not None,
                    compute_dtype=compute_dtype,
                )
                setattr(parent, name, frozen)


def make_lora_config(lora: LoraSettings, targets: Sequence[str], parts: ModelParts) -> LoraConfig:
    """Return PEFT's config for ``lora``; ``targets`` are leaf names inside blocks."""
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=sorted(targets),
        use_rslora=lora.use_rslora,
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern=dict(lora.alpha_pattern),
        layers_to_transform=None if lora.blocks is None else sorted(lora.blocks),
        layers_pattern=None if lora.blocks is None else parts.blocks.rpartition(".")[2],
        bias="none",
    )
    config._register_custom_module({FrozenLinear: FrozenLoraLinear})
    return config


def for_wrapper(config: LoraConfig, blocks: str) -> LoraConfig:
    """Return ``config`` with targets that name their whole path: leaf names would also match a vision tower.

    PEFT then refuses the adapter, by that path, on a class that keeps its text blocks elsewhere; with leaf names it
    would adapt the right layers, load none of the weights and only warn.

    Args:
        config: with leaf names as targets.
        blocks: where the class that the adapter is saved for keeps the adapted blocks.
    """
    config = copy.copy(config)
    chosen = config.layers_to_transform
    indices = r"\d+" if chosen is None else "|".join(map(str, chosen))
    leaves = "|".join(sorted(config.target_modules))
    config.target_modules = rf"{re.escape(blocks)}\.({indices})\.(.+\.)?({leaves})"
    config.layers_to_transform = config.layers_pattern = None  # PEFT takes no two ways of naming blocks
    return config


def inject(model: nn.Module, config: LoraConfig) -> None:
    """Inject PEFT's LoRA layers into a meta model, in place; no memory is taken."""
    inject_adapter_in_model(config, model, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    for _, layer in lora_layers(model):
        # Under autocast the products run in the compute dtype anyway; PEFT's own cast of the input to the adapter's
        # float32 would only be undone.
        layer.cast_input_dtype_enabled = False


def lora_layers(module: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    """Yield (path, layer) of every LoRA layer, in module order."""
    for name, child in module.named_modules():
        if isinstance(child, LoraLayer):
            yield name, child


def matched_blocks(blocks: nn.ModuleList, targets: Sequence[str]) -> dict[str, list[int]]:
    """Return, per target leaf name, the injected blocks in which it is adapted."""
    found: dict[str, list[int]] = {target: [] for target in targets}
    for index, block in enumerate(blocks):
        for leaf in {path.rpartition(".")[2] for path, _ in lora_layers(block)}:
            found[leaf].append(index)
    return found


def initial_weights(layer: LoraLayer, name: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PEFT's own initial (lora_A, lora_B) of one layer, float32 on the CPU.

    Every layer draws from a generator seeded by (run seed, layer name): the values depend neither on the order in
    which layers are made nor on the device.
    """
    lora_a, lora_b = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    rank, in_features, out_features = lora_a.out_features, lora_a.in_features, lora_b.out_features
    base = nn.Linear(in_features, out_features, bias=False, device="meta")
    seed_bytes = hashlib.blake2b(f"{seed}/lora/{name}".encode(), digest_size=4).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(seed_bytes, "little"))
        holder = type(layer)(
            base, ADAPTER, config=LoraConfig(r=rank, init_lora_weights=False), r=rank, lora_alpha=1
        )
        for weights in (holder.lora_A, holder.lora_B):
            weights[ADAPTER].to_empty(device="cpu").float()
        holder.reset_lora_parameters(ADAPTER, True)
    return holder.lora_A[ADAPTER].weight.detach(), holder.lora_B[ADAPTER].weight.detach()


def base_linears(block: nn.Module) -> Iterator[tuple[str, FrozenLinear]]:
    """Yield (path in the block as the checkpoint names it, layer) of every frozen linear."""
    for name, module in block.named_modules():
        if isinstance(module, FrozenLinear):
            yield name.removesuffix(".base_layer"), module
