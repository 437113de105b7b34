"""The gate in front of every run: is this model's architecture validated, asserted by its plugin, or refused?"""

from __future__ import annotations

import difflib
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from poros.errors import ArchitectureError, explain
from poros.evidence import ShippedReceipt, receipts_of
from poros.interfaces import Architecture
from poros.plugins import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["ArchitectureVerdict", "blockwise_arch_check"]

# Distributions whose architectures this project's own gates run. Anybody else's word is taken, loudly, as theirs.
GATED_DISTRIBUTIONS = frozenset({"poros-arch-qwen", "poros-arch-gemma"})

# What to install for a model type that no loaded plugin serves.
OFFERED_ELSEWHERE = {
    "qwen2": "poros-arch-qwen",
    "qwen3": "poros-arch-qwen",
    "qwen3_5": "poros-arch-qwen",
    "qwen3_5_text": "poros-arch-qwen",
    "gemma3": "poros-arch-gemma",
    "gemma3_text": "poros-arch-gemma",
    "gemma4": "poros-arch-gemma",
    "gemma4_text": "poros-arch-gemma",
}

# Config fields that say whether attention may look ahead, and the values under which text does not.
CAUSAL_FIELDS = {"use_bidirectional_attention": (False, "vision"), "is_causal": (True,)}

# Config fields by which mixture-of-experts types give themselves away.
EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchitectureVerdict:
    """A model that may run.

    Attributes:
        architecture: the instance that serves it.
        status: ``validated`` (gated by this project) or ``user_asserted`` (no claim of bitwise equality).
        distribution: who registered the architecture.
        receipts: the measurements behind a validated one, as its package ships them.
    """

    architecture: Architecture
    status: Literal["validated", "user_asserted"]
    distribution: str
    receipts: tuple[ShippedReceipt, ...] = ()


def blockwise_arch_check(config: PreTrainedConfig, registry: Registry) -> ArchitectureVerdict:
    """Decide by ``model_type`` and the config's features, never by a model's name.

    Returns:
        The verdict of a model that may run; ``user_asserted`` ones come with a warning.

    Raises:
        ArchitectureError: the type is unknown to Poros, is a mixture of experts or an encoder-decoder, or uses an
            unsupported feature; found, supported and how to add it are named.
    """
    model_type = config.model_type
    registered = registry.architecture_for(model_type)
    if registered is None:
        raise ArchitectureError(_refusal(config, registry))
    architecture = registered.value()
    _reject_bidirectional(config)
    architecture.check_config(config)
    if registered.distribution in GATED_DISTRIBUTIONS:
        return ArchitectureVerdict(
            architecture=architecture,
            status="validated",
            distribution=registered.distribution,
            receipts=receipts_of(architecture),
        )
    warnings.warn(
        f"Architecture `{architecture.name}` is asserted by distribution `{registered.distribution}`, not validated by "
        "Poros: no claim of bitwise equality is made for this run.",
        UserWarning,
        stacklevel=2,
    )
    return ArchitectureVerdict(
        architecture=architecture, status="user_asserted", distribution=registered.distribution
    )


def _reject_bidirectional(config: PreTrainedConfig) -> None:
    """Refuse text attention that looks ahead: right padding and the loss rest on a causal mask.

    Gemma's ``vision`` means the tokens of one image, and no image is trained.
    """
    for part in _text_parts(config):
        for field, harmless in CAUSAL_FIELDS.items():
            value = getattr(part, field, None)
            if value is not None and value not in harmless:
                raise ArchitectureError(
                    explain(
                        f"Unsupported feature inside `{config.model_type}`",
                        expected="causal attention",
                        got=f"bidirectional attention (`{field}`: {value!r})",
                        where=f"config.json, {field}",
                        next_step="Use a model that generates text: this one embeds it",
                    )
                )


def _text_parts(config: PreTrainedConfig) -> list[object]:
    """Return the config and, where it wraps one, the text model's."""
    return [config, getattr(config, "text_config", None)]


def _refusal(config: PreTrainedConfig, registry: Registry) -> str:
    supported = sorted(t for r in registry.architectures.values() for t in r.value.model_types)
    model_type = config.model_type
    if any(getattr(part, field, None) for part in _text_parts(config) for field in EXPERT_FIELDS):
        return explain(
            f"Model type `{model_type}` is a mixture of experts, which Poros does not train",
            expected=f"a dense type among {supported}",
            got=f"`{model_type}` (expert weights are 3-D parameters: neither quantized nor adapted as linear layers, "
            "and `gate_proj` would match only a shared expert)",
            where="config.json, model_type",
            next_step="Use a dense model",
        )
    if getattr(config, "is_encoder_decoder", False):
        return explain(
            f"Model type `{model_type}` is an encoder-decoder, which Poros does not train",
            expected=f"a decoder-only type among {supported}",
            got=f"`{model_type}` (two stacks of blocks and cross-attention between them)",
            where="config.json, model_type",
            next_step="Use a decoder-only model",
        )
    if package := OFFERED_ELSEWHERE.get(model_type):
        advice = f"Run `uv add {package}`, which brings it"
    else:
        near = difflib.get_close_matches(model_type, supported, n=1)
        hint = f"Did you mean a `{near[0]}` model? " if near else ""
        advice = f"{hint}Write a plugin that registers an `Architecture` for it (docs/plugins.md)"
    return explain(
        f"Model type `{model_type}` is not known to Poros",
        expected=f"one of {supported}",
        got=f"`{model_type}`",
        where="config.json, model_type",
        next_step=advice,
    )
