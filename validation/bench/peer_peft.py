"""The resident peer: PEFT + bitsandbytes NF4 with double quantization, as the documentation of both advises.

Gradient checkpointing (non-reentrant), sdpa attention, bfloat16 autocast, float32 adapters, fused AdamW. Norms,
embedding and head stay bfloat16 (`prepare_model_for_kbit_training` would make them float32 and cost several GB more).

    echo '{...}' | python validation/bench/peer_peft.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from peer_common import LEARNING_RATE, TARGETS, Peer, measure_peer, random_tensor
from torch import nn

from poros.bench import serve


def build(values: Mapping[str, Any], config: Any, device: torch.device) -> Peer:
    """Return the quantized model with adapters on every linear layer."""
    from peft import LoraConfig, get_peft_model

    config._attn_implementation = "sdpa"
    config.use_cache = False
    model = quantized_model(config, device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    lora = LoraConfig(r=values["rank"], lora_alpha=2 * values["rank"], target_modules=TARGETS)
    model = get_peft_model(model, lora)
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]

    def loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return model(input_ids=ids, labels=labels).loss

    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
    settings = {"attention": "sdpa", "gradient_checkpointing": "non-reentrant", "optimizer": "AdamW, fused"}
    return Peer(loss=loss, parameters=parameters, optimizer=optimizer, settings=settings)


def quantized_model(config: Any, device: torch.device) -> nn.Module:
    """Build the model with random weights, every linear layer of its blocks in NF4."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "lm_head" not in name:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, _quantized_linear(module, device))
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            parent, _, leaf = name.rpartition(".")
            value = random_tensor(name, parameter.shape, torch.bfloat16, device)
            setattr(model.get_submodule(parent), leaf, nn.Parameter(value, requires_grad=False))
    # Its tables are computed when it is built, so one built on the meta device holds nothing.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model


def _quantized_linear(linear: nn.Linear, device: torch.device) -> nn.Module:
    import bitsandbytes as bnb

    quantized = bnb.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=torch.bfloat16,
        quant_type="nf4",
        compress_statistics=True,
        device="meta",
    )
    weight = random_tensor("weight", linear.weight.shape, torch.bfloat16, device)
    parameter = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=True)
    quantized.weight = parameter if parameter.bnb_quantized else parameter._quantize(device)
    if linear.bias is not None:
        bias = random_tensor("bias", linear.bias.shape, torch.bfloat16, device)
        quantized.bias = nn.Parameter(bias, requires_grad=False)
    return quantized


if __name__ == "__main__":
    serve(lambda values: measure_peer(values, build))
