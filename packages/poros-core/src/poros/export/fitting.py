"""An adapter on its base: every tensor has its layer, with the rank and scaling that PEFT would give it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from peft.utils.other import get_pattern_key
from torch import nn

from poros.adapters import ADAPTER, lora_layers
from poros.architecture import blockwise_arch_check
from poros.checkpoint import load_config, resolve_model
from poros.checkpoint.names import LAYOUTS
from poros.errors import CheckpointError, ConfigError, explain
from poros.export.adapter import Adapter
from poros.interfaces import ModelParts
from poros.model import LoadedModel
from poros.plugins import Registry
from poros.run.opening import OpenModel, open_model
from poros.settings import LoraSettings, Numerics

__all__ = ["AdaptedModel", "Found", "LoraPair", "base_notes", "match_layers", "open_with_adapter", "stated"]

KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraPair:
    """One layer's adapter.

    Attributes:
        a, b: (R, in_features) and (out_features, R), on the CPU.
        scaling: what their product is multiplied by.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedModel:
    """An open model whose injected layers are those of an adapter.

    Attributes:
        model: without weights.
        pairs: by (block, path in the block).
        notes: sentences that the user should see.
    """

    model: OpenModel
    pairs: Mapping[tuple[int, str], LoraPair]
    notes: tuple[str, ...]

    def fill(self, loaded: LoadedModel) -> None:
        """Write the adapter into the bank. Layers that share a leaf name with an adapted one get zeros."""
        for block, tensor, view in loaded.bank.tensors(loaded.bank.weights):
            pair = self.pairs.get((block, tensor.path))
            if pair is None:
                view.zero_()
            else:
                view.copy_(pair.a if tensor.group == "lora_A" else pair.b)


def open_with_adapter(
    model: str | Path, adapter: Adapter, *, quantization: str, numerics: Numerics, registry: Registry
) -> AdaptedModel:
    """Open a base for an adapter that was trained on it.

    Args:
        model: folder or hub id of the base.
        quantization: weight format of the base's linear layers.
        numerics: settings that decide bits.

    Raises:
        CheckpointError: the adapter is one of another model, by the names or the shapes of its tensors.
        ConfigError: it adapts the vocabulary matrices.
        UserError: the base cannot be opened; see `open_model`.
    """
    config = load_config(resolve_model(str(model)))
    architecture = blockwise_arch_check(config, registry).architecture
    architecture.check_config(config)
    text = architecture.text_config(config)
    parts = architecture.parts(text)
    found = match_layers(adapter, architecture.build(text), parts)
    opened = open_model(
        model,
        quantization=quantization,
        lora=_settings(adapter, found, parts),
        numerics=numerics,
        registry=registry,
    )
    scalings = {
        (index, path): layer.scaling[ADAPTER]
        for index, block in enumerate(opened.meta.blocks)
        for path, layer in lora_layers(block)
    }
    pairs = {
        place: LoraPair(a=sides["A"], b=sides["B"], scaling=scalings[place])
        for place, (_, sides) in found.items()
    }
    notes = (*opened.notes, *base_notes(adapter, opened.source.fingerprint))
    return AdaptedModel(model=opened, pairs=pairs, notes=notes)


Found = dict[tuple[int, str], tuple[str, dict[str, torch.Tensor]]]


def match_layers(adapter: Adapter, module: nn.Module, parts: ModelParts) -> Found:
    """Return (PEFT's module path, sides) by (block, path), every one checked against the base's layer.

    Args:
        adapter: its keys may be those of the text model or of a multimodal wrapper.
        module: the base's text model on the meta device, not yet injected.
        parts: where its pieces live.

    Raises:
        CheckpointError, ConfigError: see `open_with_adapter`.
    """
    blocks = module.get_submodule(parts.blocks)
    linears = {name: layer for name, layer in blocks.named_modules() if isinstance(layer, nn.Linear)}
    # The same blocks under a wrapper's longer path; see `poros.checkpoint.names`.
    prefixes = tuple(f"{rename(parts.blocks)}." for rename in LAYOUTS)
    found: Found = {}
    for key, tensor in adapter.tensors.items():
        match = KEY.fullmatch(key)
        assert match is not None, "checked by load_adapter"
        name = match["module"]
        prefix = next((p for p in prefixes if name.startswith(p)), None)
        local = name.removeprefix(prefix or "")
        if prefix is None or local not in linears:
            raise _foreign(adapter, name, local if prefix else None, linears, parts)
        layer, side = linears[local], match["side"]
        features = (layer.in_features, layer.out_features)
        got = tensor.shape[1] if side == "A" else tensor.shape[0]
        if got != features[0 if side == "A" else 1]:
            raise CheckpointError(
                explain(
                    "The adapter belongs to another base: a tensor does not fit",
                    expected=f"{features[0]} in and {features[1]} out features",
                    got=f"lora_{side} of shape {list(tensor.shape)}",
                    where=f"`{name}` in {adapter.folder}",
                    next_step="Give the base that it was trained on"
                    + (f" (it names `{adapter.base_model}`)" if adapter.base_model else ""),
                )
            )
        index, _, path = local.partition(".")
        found.setdefault((int(index), path), (name, {}))[1][side] = tensor
    return found


def _foreign(
    adapter: Adapter, name: str, local: str | None, linears: Mapping[str, nn.Module], parts: ModelParts
) -> ConfigError | CheckpointError:
    leaf = name.rpartition(".")[2]
    if leaf in (parts.head.rpartition(".")[2], parts.embedding.rpartition(".")[2]):
        return ConfigError(
            explain(
                "An adapter on the vocabulary matrices is not offered",
                expected="LoRA on the linear layers of blocks",
                got=f"`{name}`",
                where=str(adapter.folder),
                next_step="Use PEFT's own `merge_and_unload` for it; a tied matrix must be untied first",
            )
        )
    near = difflib.get_close_matches(local, list(linears), n=1) if local else []
    return CheckpointError(
        explain(
            "The adapter belongs to another base: a layer is not in this one",
            expected=f"linear layers below `{parts.blocks}`",
            got=f"`{name}`",
            where=str(adapter.folder) + (f"; the nearest here is `{parts.blocks}.{near[0]}`" if near else ""),
            next_step="Give the base that it was trained on"
            + (f" (it names `{adapter.base_model}`)" if adapter.base_model else ""),
        )
    )


def stated(adapter: Adapter, name: str, sides: Mapping[str, torch.Tensor]) -> tuple[int, float]:
    """Return rank and alpha that the adapter's config gives the layer at PEFT's path ``name``.

    Raises:
        CheckpointError: its tensors have another rank.
    """
    config = adapter.config
    rank: int = config.rank_pattern.get(get_pattern_key(list(config.rank_pattern), name), config.r)
    alpha: float = config.alpha_pattern.get(
        get_pattern_key(list(config.alpha_pattern), name), config.lora_alpha
    )
    if (got := sides["A"].shape[0]) != rank:
        raise CheckpointError(
            explain(
                "The adapter contradicts its adapter_config.json",
                expected=f"rank {rank}",
                got=f"rank {got}",
                where=f"`{name}` in {adapter.folder}",
                next_step="Save it again: its scaling would be wrong",
            )
        )
    return rank, alpha


def _settings(adapter: Adapter, found: Found, parts: ModelParts) -> LoraSettings:
    """Return the settings that inject these layers; what PEFT's patterns come to is stated per layer."""
    config = adapter.config
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for (block, path), (name, sides) in found.items():
        rank, alpha = stated(adapter, name, sides)
        key = re.escape(f"{parts.blocks}.{block}.{path}")
        if rank != config.r:
            ranks[key] = rank
        if alpha != config.lora_alpha:
            alphas[key] = alpha
    return LoraSettings(
        rank=config.r,
        alpha=config.lora_alpha,
        targets=tuple(sorted({path.rpartition(".")[2] for _, path in found})),
        blocks=tuple(sorted({block for block, _ in found})),
        use_rslora=config.use_rslora,
        rank_pattern=ranks,
        alpha_pattern=alphas,
    )


def base_notes(adapter: Adapter, fingerprint: str) -> tuple[str, ...]:
    """Return what the user should know where an adapter was not trained on the weight files of this fingerprint."""
    trained = adapter.base_fingerprint
    if trained is None or trained == fingerprint:
        return ()
    return (
        "The run that trained this adapter read other weight files than these (names, sizes, headers or sampled bytes "
        "differ). If this is not the same model saved anew, the result is meaningless.",
    )
