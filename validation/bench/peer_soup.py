"""The streamed peer: Soup's `stream_layers` on the RAM tier, NF4 with double quantization, built by its own functions.

The set-up follows `soup_cli.trainer.stream_setup` (soup-cli 0.77): shard the checkpoint offline, build the streamed
model, compute head and loss in chunks (`stream_loss_chunk`), page-lock the store. Its trainer would add data loading
and logging to every step; here the same whole optimizer steps run as for everybody else.

Its layer files carry no layer number, so one random layer is sharded and stands for all of them.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peer_common import LEARNING_RATE, TARGETS, WEIGHT_SCALE, Peer, measure_peer
from safetensors.torch import save_file

from poros.bench import serve

LOSS_CHUNK = 512
BUFFERS = 2
POOL_ELEMENTS = (1 << 20) + 1  # odd, so that rows differ


def build(values: Mapping[str, Any], config: Any, device: torch.device) -> Peer:
    """Return the streamed model with adapters on every linear layer."""
    from peft import LoraConfig
    from soup_cli.utils.layer_shard import QUANT_NF4, read_shard_index
    from soup_cli.utils.layer_stream_runtime import build_streamed_model
    from soup_cli.utils.stream_loss_chunk import ChunkedHeadLoss, causal_lm_of

    settings = {"loss_chunk": LOSS_CHUNK, "buffers": BUFFERS, "nf4_scale_cache": False, **values["settings"]}
    shards = _shards(values, config, device)
    lora = LoraConfig(
        r=values["rank"], lora_alpha=2 * values["rank"], target_modules=TARGETS, task_type="CAUSAL_LM"
    )
    model, runtime = build_streamed_model(
        model_id=values["model"],
        shard_dir=str(shards),
        index=read_shard_index(str(shards)),
        lora_config=lora,
        device=str(device),
        dtype="bfloat16",
        buffers=settings["buffers"],
        pin=device.type == "cuda",
        quant=QUANT_NF4,
        double_quant=True,
        nf4_scale_cache=settings["nf4_scale_cache"],
    )
    ChunkedHeadLoss(causal_lm_of(model), settings["loss_chunk"])
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]

    def loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return model(input_ids=ids, labels=labels).loss

    return Peer(
        loss=loss,
        parameters=parameters,
        optimizer=torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True),
        settings={
            **settings,
            "optimizer": "AdamW, fused",
            "attention": str(model.config._attn_implementation),
        },
        after=lambda: _traffic(runtime.stats(), values),
    )


def _traffic(stats: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return Soup's own counters, and from its loads the bytes that a step moved."""
    moved = stats["layer_loads"] * stats["store_bytes"] / stats["n_layers"]
    moved += stats["large_loads"] * stats["large_buffer_bytes"]
    return {
        "h2d_bytes_per_step": moved / (values["warmup_steps"] + values["steps"]),
        "store_payload_bytes": stats["store_bytes"],
        "store_allocated_bytes": stats["pinned_bytes"] or stats["store_bytes"],
    }


def _shards(values: Mapping[str, Any], config: Any, device: torch.device) -> Path:
    """Return Soup's cache of the model, made once per shape: one sharded layer, linked to once per layer."""
    from soup_cli.utils.layer_shard import (
        QUANT_NF4,
        layer_shard_path,
        read_shard_index,
        shard_checkpoint,
    )
    from soup_cli.utils.layer_stream import stream_arch_of
    from soup_cli.utils.layer_stream_runtime import build_meta_skeleton, quantised_layer_suffixes

    name = Path(values["model"]).name
    shards, source = Path(values["scratch"]) / f"{name}-soup", Path(values["scratch"]) / f"{name}-one-layer"
    if shards.exists():
        return shards
    # Soup accepts cache folders below the working directory, the home folder or the temporary folder only.
    _one_layer_checkpoint(source, config)
    skeleton = build_meta_skeleton(str(source), dtype="bfloat16", quant=QUANT_NF4)
    index = shard_checkpoint(
        str(source),
        str(shards),
        dtype="bfloat16",
        arch=stream_arch_of(config),
        quant=QUANT_NF4,
        quant_suffixes=quantised_layer_suffixes(skeleton),
        quant_device=device.type,
    )
    first = layer_shard_path(str(shards), 0)
    for layer in range(1, config.num_hidden_layers):
        os.link(first, layer_shard_path(str(shards), layer))
    _write_index(dataclasses.replace(index, n_layers=config.num_hidden_layers), shards)
    assert read_shard_index(str(shards)).n_layers == config.num_hidden_layers
    return shards


def _one_layer_checkpoint(folder: Path, config: Any) -> None:
    """Write random weights, drawn on the host and repeated: drawing tables on the device would raise its peak."""
    from transformers import AutoModelForCausalLM

    shallow = copy.deepcopy(config)
    shallow.num_hidden_layers = 1
    if getattr(shallow, "layer_types", None):
        shallow.layer_types = shallow.layer_types[:1]
    shallow.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shallow, dtype=torch.bfloat16)
    pool = torch.randn(POOL_ELEMENTS, dtype=torch.bfloat16).mul_(WEIGHT_SCALE)
    tensors = {}
    for name, value in model.state_dict().items():
        count = value.numel()
        drawn = pool.repeat(-(-count // POOL_ELEMENTS))[:count].view(value.shape)
        tensors[name] = torch.ones_like(drawn) if "norm" in name else drawn.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_index(index: Any, shards: Path) -> None:
    from soup_cli.utils.layer_shard import _atomic_write_index

    _atomic_write_index(index, str(shards))


if __name__ == "__main__":
    serve(lambda values: measure_peer(values, build))
