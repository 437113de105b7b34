"""What every peer's script shares: random weights, whole optimizer steps, and how they are measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from poros.bench import MemoryMeter, time_steps
from poros.checkpoint import load_config

WEIGHT_SCALE = 0.02
LEARNING_RATE = 1e-4
MAX_GRAD_NORM = 1.0
DATA_SEED = 11
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A peer's model ready to be stepped.

    Attributes:
        loss: from (input ids, labels) to the mean loss of one micro-batch.
        parameters: what is trained.
        optimizer: over them.
        settings: what was chosen, for the receipt.
        after: called once when everything has been measured, to add facts.
    """

    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    settings: Mapping[str, Any]
    after: Callable[[], dict[str, Any]] = dict


def measure_peer(
    values: Mapping[str, Any], build: Callable[[Mapping[str, Any], Any, torch.device], Peer]
) -> dict[str, Any]:
    """Build the peer's model and time whole optimizer steps: forward, backward, clipping, AdamW.

    Args:
        values: of a `poros.bench.BenchSpec`.
        build: makes the peer from (values, config, device).
    """
    device = torch.device(values["device"])
    meter = MemoryMeter(device, values["memory_limit_bytes"])
    config = load_config_of(values)
    peer = build(values, config, device)
    count = values["micro_batches"]
    last: dict[str, torch.Tensor] = {}
    batches = [
        [batch.to(device) for batch in make_batches(values, config.vocab_size, index)]
        for index in range(values["warmup_steps"] + values["steps"])
    ]

    def step(index: int) -> None:
        total = torch.zeros((), device=device)
        for ids in batches[index]:
            loss = peer.loss(ids, ids) / count
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(peer.parameters, MAX_GRAD_NORM)
        peer.optimizer.step()
        peer.optimizer.zero_grad(set_to_none=True)
        last["loss"] = total

    times = time_steps(step, device, warmup_steps=values["warmup_steps"], steps=values["steps"])
    loss = float(last["loss"])
    if loss != loss:
        raise RuntimeError("the last step's loss is NaN: this measures nothing")
    tokens = count * values["micro_batch_size"] * values["tokens"]
    return {
        "settings": dict(peer.settings),
        "micro_batches": count,
        "micro_batch_size": values["micro_batch_size"],
        "tokens": values["tokens"],
        "tokens_per_step": tokens,
        **times.facts(),
        "tokens_per_second": tokens / times.step_seconds,
        "trained_parameters": sum(p.numel() for p in peer.parameters),
        "trained_dtype": str(peer.parameters[0].dtype),
        "loss": loss,
        **meter.read(),
        **peer.after(),
    }


def load_config_of(values: Mapping[str, Any]) -> Any:
    """Return the config in the spec's folder."""
    from pathlib import Path

    return load_config(Path(values["model"]))


def make_batches(values: Mapping[str, Any], vocab_size: int, step: int) -> list[torch.Tensor]:
    """Return the token ids of one step's micro-batches, drawn like `poros.bench`'s."""
    generator = torch.Generator().manual_seed(DATA_SEED * 1000 + step)
    shape = (values["micro_batch_size"], values["tokens"])
    return [torch.randint(1, vocab_size, shape, generator=generator) for _ in range(values["micro_batches"])]


def random_tensor(name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return values that keep activations finite over any depth: small weights, norms of one."""
    if "norm" in name:
        return torch.ones(shape, dtype=dtype, device=device)
    return torch.randn(shape, dtype=dtype, device=device).mul_(WEIGHT_SCALE)
