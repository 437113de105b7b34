"""The first blocks of a model: what is compared where the whole one does not fit the device resident."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from poros.plugins import Registry
from poros.run.opening import OpenModel, describe_model
from poros.settings import Plan

__all__ = ["cut_depth", "cut_plan"]


def cut_depth(model: OpenModel, num_blocks: int, registry: Registry) -> OpenModel:
    """Return ``model`` with its first ``num_blocks`` blocks only, same weights, same adapters on these.

    Raises:
        UserError: the family cannot be built so short, or none of these blocks has an adapter.
    """
    whole = len(model.meta.blocks)
    config = copy.deepcopy(model.config)
    text: Any = config.get_text_config()
    text.num_hidden_layers = num_blocks
    if getattr(text, "layer_types", None):
        text.layer_types = list(text.layer_types)[:num_blocks]
    if shared := getattr(text, "num_kv_shared_layers", 0):  # these are the last ones
        text.num_kv_shared_layers = max(0, num_blocks - (whole - shared))
    lora = model.lora
    if lora.blocks is not None:
        lora = replace(lora, blocks=tuple(block for block in lora.blocks if block < num_blocks))
    verdict, weight_format, meta = describe_model(
        config, quantization=model.weight_format.name, lora=lora, numerics=model.numerics, registry=registry
    )
    start = model.start
    if start is not None:
        kept = {place: tensors for place, tensors in start.tensors.items() if place[0] < num_blocks}
        start = replace(start, tensors=kept)
    return replace(
        model,
        config=config,
        verdict=verdict,
        weight_format=weight_format,
        lora=lora,
        meta=meta,
        start=start,
    )


def cut_plan(plan: Plan, num_blocks: int, whole: int) -> Plan:
    """Return a streamed plan for fewer blocks: the same share of them stays on the device, or is kept."""
    return replace(
        plan,
        resident_blocks=plan.resident_blocks * num_blocks // whole,
        kept_blocks=plan.kept_blocks * num_blocks // whole,
    )
