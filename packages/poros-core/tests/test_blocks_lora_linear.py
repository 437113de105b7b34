"""LoRA and its frozen product in one function, against PEFT's own forward over the same tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear
from torch import nn

from poros.adapters import ADAPTER
from poros.blocks.lora_linear import FrozenLoraLinear
from poros.parity.case_run import CaseRun

# Measured 2026-11-30, x86-64 CPU, torch 2.15, float32, relative to the largest element: 3.5e-7, sums in another order.
TOLERANCE = 2e-6

Forward = Callable[[FrozenLoraLinear, torch.Tensor], torch.Tensor]


def run_layer(layer: FrozenLoraLinear, forward: Forward) -> list[torch.Tensor]:
    """Return output and the gradients of input, A and B under one dropout mask."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, layer.base_layer.in_features, generator=generator).requires_grad_()
    torch.manual_seed(2)
    output = forward(layer, x)
    upstream = torch.randn(output.shape, generator=generator)
    weights = [getattr(layer, group)[ADAPTER].weight for group in ("lora_A", "lora_B")]
    return [output.detach(), *torch.autograd.grad(output, [x, *weights], upstream)]


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("training", [False, True])
def test_output_and_gradients_are_those_of_peft(
    training: bool, dropout: float, rslora: bool, start_run: Callable[..., CaseRun]
) -> None:
    lora = {"rank": 2, "dropout": dropout, "use_rslora": rslora}
    run = start_run(compute_dtype=torch.float32, lora=lora)
    run.train(1)
    template = next(iter(run.engine._templates))
    template.set_training(training)
    layers = [module for module in template.module.modules() if isinstance(module, FrozenLoraLinear)]
    assert len(layers) == 7
    for layer in layers:
        ours, theirs = run_layer(layer, FrozenLoraLinear.forward), run_layer(layer, Linear.forward)
        for found, expected in zip(ours, theirs, strict=True):
            assert expected.any()
            assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_over_a_plain_base_layer_they_are_those_of_peft_too(dropout: float) -> None:
    """What a compiled block is made of; the scaling is applied at another place."""
    layer = FrozenLoraLinear(
        nn.Linear(12, 20, bias=False),
        ADAPTER,
        config=LoraConfig(r=3, lora_dropout=dropout),
        r=3,
        lora_alpha=5,
        lora_dropout=dropout,
    )
    nn.init.normal_(layer.lora_B[ADAPTER].weight)
    ours, theirs = run_layer(layer, FrozenLoraLinear.forward), run_layer(layer, Linear.forward)
    for found, expected in zip(ours, theirs, strict=True):
        assert expected.any()
        assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()
