"""What one bench process measures, as plain data that fits on one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from poros.errors import ConfigError, explain
from poros.planning.request import PlanRequest
from poros.settings import LoraSettings, Numerics, Plan, named_dtypes

__all__ = ["MODES", "BenchSpec"]

MODES = ("time", "check")


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchSpec:
    """One configuration: a model's shape, a step's shape, numerics and a plan.

    Attributes:
        model: folder that holds ``config.json``; weights are random and none are read.
        quantization: registered name of the weight format.
        rank: of the adapters on every linear layer.
        plan: keyword arguments of `Plan`; of a `PlanRequest` where the plan is the planner's.
        planned: the planner decides what ``plan`` leaves open, within ``memory_limit_bytes`` if there is one.
        numerics: keyword arguments of `Numerics`; dtypes by name.
        micro_batches, micro_batch_size, tokens: of every optimizer step. Tokens are a row's length, all supervised.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        mode: ``time`` measures the plan; ``check`` trains it and a truly resident run and compares every bit.
        warmup_steps: steps before the timed ones (kernels load, graphs are captured, code is compiled).
        steps: timed steps, or steps that are compared.
        oracle_graphs: in mode ``check``, whether the resident run replays graphs; eager blocks are compared both ways.
        memory_limit_bytes: the process may take this much device memory, CUDA context included.
    """

    model: str
    quantization: str = "nf4"
    rank: int = 16
    plan: Mapping[str, Any] = field(default_factory=dict)
    planned: bool = False
    numerics: Mapping[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    micro_batch_size: int = 1
    tokens: int = 512
    device: str = "cuda"
    mode: str = "time"
    warmup_steps: int = 3
    steps: int = 5
    oracle_graphs: bool = True
    memory_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("micro_batches", 1),
            ("micro_batch_size", 1),
            ("tokens", 2),
            ("steps", 1),
            ("warmup_steps", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(
                    explain(
                        f"Bad bench setting `{name}`", expected=f"at least {least}", got=getattr(self, name)
                    )
                )
        if self.mode not in MODES:
            raise ConfigError(explain("Bad bench setting `mode`", expected=" | ".join(MODES), got=self.mode))

    @property
    def tokens_per_step(self) -> int:
        """Positions of one optimizer step."""
        return self.micro_batches * self.micro_batch_size * self.tokens

    def make_request(self) -> PlanRequest:
        """Return what of the placement is decided."""
        return PlanRequest(**self.plan) if self.planned else PlanRequest.of(Plan(**self.plan))

    def make_numerics(self) -> Numerics:
        """Return the numerics."""
        named: dict[str, Any] = {
            k: named_dtypes()[v] if k.endswith("_dtype") else v for k, v in self.numerics.items()
        }
        return Numerics(**named)

    def make_lora(self) -> LoraSettings:
        """Return the adapters: the architecture's default targets, which are all linear layers."""
        return LoraSettings(rank=self.rank, alpha=2 * self.rank)

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> BenchSpec:
        """Return the spec of `to_json`'s content; keys of the process protocol are ignored."""
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})
