"""The settings of a training run besides the model and its adapters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from poros.errors import ConfigError, explain
from poros.planning.request import PlanRequest
from poros.settings import OptimizerSettings, Plan

__all__ = ["RunSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """Where a run runs, what it keeps and how it optimizes.

    Attributes:
        output: folder for checkpoints, metrics, ``run.json`` and the final adapter.
        device: ``auto`` (a CUDA device if there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        seed: adapter initialization and dropout follow from it.
        save_every, eval_every: optimizer steps between checkpoints and evaluations; None is only at the end.
        early_stop_patience: end the run after so many evaluations in a row that improved on none before them; None
            never does.
        early_stop_min_delta: a held-out loss has improved if it is lower than the last improved one by more than this.
        sample_every: optimizer steps between answers to the sample prompts; None is only before the first step and at
            the end.
        keep_checkpoints: newest checkpoints that are kept.
        keep_best: keep the checkpoint of the evaluation with the lowest loss besides these, and let the final adapter
            be that one.
        resume: go on from the newest complete checkpoint in ``output``.
        overwrite: replace the run in a used ``output``.
        cache_dir: folder for quantized stores, which makes the second start of a model skip quantization; None keeps
            none.
        device_budget_bytes: device memory that the run may take, the whole process; None is the least with which it is
            predicted to run at its full speed.
        host_budget_bytes: host memory that the run may take besides the process itself; None is what is free.
        plan: where everything lives; fields of a `PlanRequest` that are None are chosen by the planner.
        warm_up: run the largest step twice before the first one, without using its results; None is on a GPU, where
            memory is allocated and graphs are captured in it.
    """

    output: Path | str
    device: str = "auto"
    seed: int = 0
    save_every: int | None = None
    eval_every: int | None = None
    early_stop_patience: int | None = None
    early_stop_min_delta: float = 0.0
    sample_every: int | None = None
    keep_checkpoints: int = 2
    keep_best: bool = False
    resume: bool = False
    overwrite: bool = False
    cache_dir: Path | str | None = None
    device_budget_bytes: int | None = None
    host_budget_bytes: int | None = None
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    plan: Plan | PlanRequest = field(default_factory=PlanRequest)
    warm_up: bool | None = None

    def __post_init__(self) -> None:
        for name in (
            "save_every",
            "eval_every",
            "early_stop_patience",
            "sample_every",
            "keep_checkpoints",
            "device_budget_bytes",
            "host_budget_bytes",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(explain(f"Bad setting `{name}`", expected="a positive integer", got=value))
        if not 0 <= self.early_stop_min_delta < math.inf:
            raise ConfigError(
                explain(
                    "Bad setting `early_stop_min_delta`",
                    expected="zero or more",
                    got=self.early_stop_min_delta,
                )
            )
        if self.eval_every is None:
            for name, given in (
                ("early_stop_patience", self.early_stop_patience is not None),
                ("keep_best", self.keep_best),
            ):
                if given:
                    raise ConfigError(
                        explain(
                            f"Bad setting `{name}`",
                            expected="`eval_every` beside it: it chooses among the evaluations of a run",
                            got="none",
                        )
                    )
        if self.resume and self.overwrite:
            raise ConfigError(
                explain(
                    "Bad settings `resume` and `overwrite`",
                    expected="at most one of them",
                    got="both",
                    next_step="Keep `resume` to go on, or `overwrite` to start anew",
                )
            )
