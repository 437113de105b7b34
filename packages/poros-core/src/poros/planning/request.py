"""What a plan is made from besides the model: what the user pinned, and the memory that may be used."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from poros.settings import Plan

__all__ = ["Budget", "PlanRequest"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """The fields of a `Plan` that somebody decided; the planner decides those that are None.

    They are explained there (`poros.settings.Plan`).
    """

    residency: str | None = None
    num_slots: int | None = None
    resident_blocks: int | None = None
    kept_blocks: int | None = None
    disk_blocks: int | None = None
    head: str | None = None
    activations: str | None = None
    order: str | None = None
    workspace: bool | None = None
    graphs: bool | None = None
    pin_host_memory: bool | None = None

    def __post_init__(self) -> None:
        # Complains about values that no plan can have.
        Plan(**{"resident_blocks": self.kept_blocks or 0, **self.pinned()})

    def pinned(self) -> dict[str, Any]:
        """Return the decided fields."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}

    @classmethod
    def of(cls, plan: Plan) -> PlanRequest:
        """Return the request that leaves nothing open."""
        return cls(**{f.name: getattr(plan, f.name) for f in fields(cls)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Memory that a run may take.

    Attributes:
        device_bytes: the whole process on the device: CUDA context and everything that is allocated. None is no limit.
        host_bytes: host memory besides the process itself. None is no limit.
        device_limit, host_limit: what sets them, in words, for messages.
        frugal: take the least device memory whose step time is next to the fastest one, instead of the fastest plan.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    device_limit: str = "no limit"
    host_limit: str = "no limit"
    frugal: bool = True
