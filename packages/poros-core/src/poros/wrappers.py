"""Multimodal wrappers: only their text model is trained, and adapters are saved for the class that users will load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["find_blocks", "stock_model", "tower_linears"]


def stock_model(config: PreTrainedConfig) -> nn.Module:
    """Return the class that a user's own `AutoModelForCausalLM` gives for this config, on the meta device.

    Of some wrappers (Qwen3.5) that is the text-only class, of others (Gemma 3) the wrapper's own.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def find_blocks(model: nn.Module, block: nn.Module) -> str:
    """Return where ``model`` keeps the decoder layers of the class of ``block``: ``model.layers`` or deeper."""
    (path,) = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and type(module[0]) is type(block)
    ]
    return path


def tower_linears(config: PreTrainedConfig, block: nn.Module) -> Sequence[str]:
    """Return the paths of a wrapper's linear layers outside its text model, by the names of the wrapper's own class.

    Args:
        config: the wrapper's.
        block: one decoder layer of the text model.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        auto = AutoModelForImageTextToText
    elif type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        auto = AutoModelForCausalLM
    else:
        return ()
    with torch.device("meta"):
        model: nn.Module = auto.from_config(config)
    text_model = find_blocks(model, block).rpartition(".")[0]
    return tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith(f"{text_model}.") and name != "lm_head"
    )
