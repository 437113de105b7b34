"""Random weights keep clear of defaults: norms around the value that leaves hidden states as they are."""

from __future__ import annotations

import torch
from torch import nn

from poros.parity.random_model import RandomSource, zero_centred_norms


class Scaling(nn.Module):
    """A norm that multiplies by its weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class AddedToOne(Scaling):
    """A norm that multiplies by one plus its weight, as Gemma's does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + self.weight)


class Gated(Scaling):
    """A norm that takes a gate besides."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x * self.weight * gate


def test_norms_whose_weight_is_added_to_one_are_found_by_what_they_do() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict(
            {"q_norm": AddedToOne(8), "k_norm": Scaling(8), "norm": Gated(8), "mlp": nn.Linear(4, 4)}
        )
    assert zero_centred_norms(model) == {"q_norm.weight"}


def test_they_are_drawn_around_zero_and_the_others_around_one() -> None:
    shapes = {"q_norm.weight": (4096,), "k_norm.weight": (4096,)}
    source = RandomSource(shapes, 1, torch.device("cpu"), {"q_norm.weight"})
    means = [float(source.load(name, torch.device("cpu")).float().mean()) for name in shapes]
    assert abs(means[0]) < 0.01
    assert abs(means[1] - 1) < 0.01
