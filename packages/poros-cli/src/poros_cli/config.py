"""The settings of `poros train`: what a config file, `--set` and flags may say, and the rules between them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from poros.errors import ConfigError, explain
from poros.planning.request import PlanRequest
from poros.settings import LoraSettings, Numerics, OptimizerSettings
from poros.units import parse_size
from poros_data import DataError, RowSettings, as_sources

__all__ = ["RunConfig"]

DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
POSITIVE = (
    "max_steps",
    "epochs",
    "micro_batch_size",
    "micro_batches",
    "max_length",
    "save_every",
    "eval_every",
    "early_stop_patience",
    "sample_every",
    "sample_tokens",
    "keep_checkpoints",
)
SIZES = ("vram", "ram")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Everything that `poros train` is told.

    Attributes:
        model: local folder or hub id of the base model.
        data: training rows: a file, a folder or a hub id, a list of these, or a mapping of these to weights (how often
            their rows come in an epoch).
        output: folder for checkpoints, metrics and the final adapter.
        eval_data: held-out rows, JSONL.
        eval_fraction: share of the training rows to hold out instead, chosen by ``seed``; they are not trained on.
        quantization: weight format of the frozen linear layers.
        device: ``auto`` (a CUDA device if there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        seed: adapter initialization, order of rows and dropout follow from it.
        max_steps: optimizer steps at most.
        epochs: passes over the data at most; None is one, or as many as ``max_steps`` needs.
        micro_batch_size: rows that go through the model together.
        micro_batches: micro-batches per optimizer step.
        max_length: tokens per row at most.
        save_every, eval_every: optimizer steps between checkpoints and evaluations; None is only at the end.
        early_stop_patience: end the run after so many evaluations in a row without an improvement; None never does.
        early_stop_min_delta: a held-out loss has improved if it is lower than the last improved one by more than this.
        keep_checkpoints: newest checkpoints that are kept.
        keep_best: keep the checkpoint with the lowest held-out loss besides these; the final adapter is that one.
        sample_prompts: prompts to answer from time to time, or a file with one per line; None is none.
        sample_every: optimizer steps between answers; None is only before the first step and at the end.
        sample_tokens: tokens of one answer at most.
        report_to: registered reporters that are told what the run does, besides ``metrics.jsonl``.
        resume: go on from the newest complete checkpoint in ``output``.
        overwrite: empty a used ``output`` first.
        cache_dir: folder for quantized stores and tokenized rows: the second start skips quantization and tokenizing;
            None keeps none.
        vram: device memory that the run may take, the whole process, such as ``8GB``; None is the least with which it
            is predicted to run at full speed.
        ram: host memory that the run may take, such as ``24GB``; None is what is free.
        rows: how rows are made from the data.
        plan: what the planner must not decide itself.
    """

    model: str
    data: str | tuple[str, ...] | Mapping[str, float]
    output: str
    eval_data: str | None = None
    eval_fraction: float | None = None
    quantization: str = "nf4"
    device: str = "auto"
    seed: int = 0
    max_steps: int | None = None
    epochs: int | None = None
    micro_batch_size: int = 1
    micro_batches: int = 8
    max_length: int = 1024
    save_every: int | None = None
    eval_every: int | None = None
    early_stop_patience: int | None = None
    early_stop_min_delta: float = 0.0
    keep_checkpoints: int = 2
    keep_best: bool = False
    sample_prompts: str | tuple[str, ...] | None = None
    sample_every: int | None = None
    sample_tokens: int = 64
    report_to: tuple[str, ...] = ()
    resume: bool = False
    overwrite: bool = False
    cache_dir: str | None = None
    vram: str | None = None
    ram: str | None = None
    rows: RowSettings = field(default_factory=RowSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    numerics: Numerics = field(default_factory=Numerics)
    plan: PlanRequest = field(default_factory=PlanRequest)

    def __post_init__(self) -> None:
        for name in ("model", "data", "output"):
            if not (
                getattr(self, name).strip() if name != "data" or isinstance(self.data, str) else self.data
            ):
                raise ConfigError(explain(f"Bad setting `{name}`", expected="a path or name", got="nothing"))
        try:
            as_sources(self.data)
        except DataError as error:
            raise ConfigError(f"Bad setting `data`: {error}") from error
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(explain(f"Bad setting `{name}`", expected="a positive integer", got=value))
        if not 0 <= self.seed < 2**63:
            raise ConfigError(explain("Bad setting `seed`", expected="0 .. 2**63 - 1", got=self.seed))
        if not DEVICE.fullmatch(self.device):
            expected = "auto, cpu, cuda or cuda:N"
            raise ConfigError(explain("Bad setting `device`", expected=expected, got=repr(self.device)))
        for name in SIZES:
            if (size := getattr(self, name)) is not None:
                parse_size(size, name)
        if self.resume and self.overwrite:
            message = explain(
                "Bad settings `resume` and `overwrite`",
                expected="at most one of them",
                got="both",
                next_step="Keep `resume` to go on, or `overwrite` to start anew",
            )
            raise ConfigError(message)
        self._check_evaluation()
        if self.sample_every is not None and not self.sample_prompts:
            message = explain(
                "Bad setting `sample_every`",
                expected="`sample_prompts` beside it",
                got="none",
                next_step="Give prompts, or remove `sample_every`",
            )
            raise ConfigError(message)

    def _check_evaluation(self) -> None:
        """Refuse held-out rows of two kinds, and whatever chooses among evaluations that do not take place."""
        if self.eval_fraction is not None and not 0 < self.eval_fraction < 1:
            raise ConfigError(
                explain(
                    "Bad setting `eval_fraction`", expected="a share between 0 and 1", got=self.eval_fraction
                )
            )
        if not 0 <= self.early_stop_min_delta < math.inf:
            raise ConfigError(
                explain(
                    "Bad setting `early_stop_min_delta`",
                    expected="zero or more",
                    got=self.early_stop_min_delta,
                )
            )
        if self.eval_fraction is not None and self.eval_data is not None:
            message = explain(
                "Bad settings `eval_fraction` and `eval_data`",
                expected="at most one of them",
                got="both",
                next_step="Keep `eval_data` for rows of their own, or `eval_fraction` to hold out some of `data`",
            )
            raise ConfigError(message)
        if self.eval_every is not None and self.eval_data is None and self.eval_fraction is None:
            message = explain(
                "Bad setting `eval_every`",
                expected="`eval_data` beside it, or `eval_fraction`",
                got="none",
                next_step="Name held-out rows in `eval_data`, or remove `eval_every`",
            )
            raise ConfigError(message)
        for name, given in (
            ("early_stop_patience", self.early_stop_patience is not None),
            ("keep_best", self.keep_best),
        ):
            if given and self.eval_every is None:
                message = explain(
                    f"Bad setting `{name}`",
                    expected="`eval_every` beside it: it chooses among the evaluations of a run",
                    got="none",
                    next_step=f"Set `eval_every`, or remove `{name}`",
                )
                raise ConfigError(message)
