"""One side of a comparison: a run of the user's own trainer, recorded step by step."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from poros.checkpoint import check_free_space
from poros.errors import BudgetError, PorosError, UserError
from poros.interfaces import StepSource
from poros.optimizer import BankOptimizer
from poros.planning.request import PlanRequest
from poros.plugins import Registry
from poros.run import OpenModel, Reporter, RunSettings, StepEvent, Trainer
from poros.run.fingerprint import flatten
from poros.run.record import environment
from poros.settings import Plan
from poros.verify.controls import DROPPED_MOMENT, PARTS
from poros.verify.depth import cut_depth, cut_plan
from poros.verify.recorder import StepRecorder, step_bytes

__all__ = ["SideSpec", "Subject", "control_plan", "plan_for_blocks", "run_side"]

CHECKPOINTS = "run"
# A resident run of fewer blocks than this says little about a model.
LEAST_BLOCKS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SideSpec:
    """What one side runs.

    Attributes:
        name: of its folder.
        residency: ``streamed`` or ``resident``.
        plan: keyword arguments of the `Plan` to use; None lets the planner choose within what the user decided.
        num_blocks: only so many first blocks; None is the whole model.
        steps: optimizer steps that are done at its end.
        resume_from: name of the side whose checkpoint it goes on from.
        part: of `poros.verify.controls.PARTS`.
        resident_bytes: device memory that a resident side may take; None is what is free.
        keep_checkpoint: another side goes on from this one's checkpoint.
    """

    name: str
    residency: str = "streamed"
    plan: Mapping[str, Any] | None = None
    num_blocks: int | None = None
    steps: int
    resume_from: str | None = None
    part: str | None = None
    resident_bytes: int | None = None
    keep_checkpoint: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is verified: a model, its rows and the settings of its run.

    Attributes:
        about: how it was made, for the receipt.
    """

    model: OpenModel
    steps: StepSource
    settings: RunSettings
    registry: Registry
    about: Mapping[str, Any] = field(default_factory=dict)


class _StopAfter(Reporter):
    """Asks the trainer to end after a step."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.trainer: Trainer | None = None

    def on_step(self, event: StepEvent) -> None:
        """See `Reporter.on_step`."""
        if event.step >= self._step and self.trainer is not None:
            self.trainer.request_stop()


def run_side(spec: SideSpec, subject: Subject, folder: Path) -> dict[str, Any]:
    """Run one side and return what is known of it; recorded steps lie in ``folder / spec.name``.

    A side that cannot run, or ends early, is a result too: ``failure`` says why, and ``out_of_memory`` whether memory
    was too little. What it recorded until then is there.

    Args:
        spec: what to run.
        subject: whose run it is.
        folder: of all sides.
    """
    part = PARTS[spec.part] if spec.part else None
    own = folder / spec.name
    own.mkdir(parents=True)
    result: dict[str, Any] = {"name": spec.name, "steps": {}, "failure": None, "out_of_memory": False}
    trainer: Trainer | None = None
    recorder: StepRecorder | None = None
    try:
        if spec.resume_from is not None:
            shutil.copytree(folder / spec.resume_from / CHECKPOINTS, own / CHECKPOINTS)
        stop = _StopAfter(spec.steps)
        trainer = _make_trainer(spec, subject, own / CHECKPOINTS, stop, result)
        stop.trainer = trainer
        engine = trainer.load()
        assert trainer._optimizer is not None
        if spec.residency == "streamed" and engine.slots is None:
            raise UserError("The streamed side streams nothing: every block stays on the device.")
        if part is not None and part.make_engine is None:
            _drop_moment(trainer._optimizer)
        check_free_space(own, spec.steps * step_bytes(engine), "the recorded steps")
        recorder = StepRecorder(own, engine, trainer._optimizer)
        done = trainer.run()
        result["h2d_bytes"] = done.h2d_bytes
        result["side_traffic_bytes"] = getattr(engine.slots, "traffic_bytes", None)
    except (torch.OutOfMemoryError, BudgetError) as error:
        result |= {"failure": str(error), "out_of_memory": True}
    except PorosError as error:
        result["failure"] = str(error)
    except Exception as error:  # a broken engine may fail in any way; what it recorded still counts
        result["failure"] = f"{type(error).__name__}: {error}"
    finally:
        if recorder is not None:
            recorder.close()
            result["steps"] = {str(step): digest for step, digest in recorder.hashes.items()}
        if trainer is not None:
            trainer.close()
        if not spec.keep_checkpoint:
            shutil.rmtree(own / CHECKPOINTS, ignore_errors=True)
        del trainer, recorder
        gc.collect()  # engines hold graphs and pinned memory in cycles; the next side needs both
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return result


def _make_trainer(
    spec: SideSpec, subject: Subject, output: Path, stop: Reporter, result: dict[str, Any]
) -> Trainer:
    model = subject.model
    if spec.num_blocks is not None:
        model = cut_depth(model, spec.num_blocks, subject.registry)
    part = PARTS[spec.part] if spec.part else None
    if part is not None and part.make_engine is not None:
        model = replace(model, make_engine=part.make_engine)
    settings = replace(
        subject.settings,
        output=output,
        save_every=None,
        # Evaluations and answers change no training bit; they only take time here.
        eval_every=None,
        early_stop_patience=None,
        sample_every=None,
        keep_best=False,
        keep_checkpoints=1,
        resume=spec.resume_from is not None,
        overwrite=False,
        # A fault must meet the first step's copies too, not only those of a warm-up whose results are thrown away.
        warm_up=False if part is not None else subject.settings.warm_up,
    )

    def make(model: OpenModel, settings: RunSettings) -> Trainer:
        return Trainer(model, subject.steps, settings, reporters=(stop,))

    if spec.plan is not None:
        trainer = make(model, replace(settings, plan=Plan(**spec.plan)))
    elif spec.residency == "resident":
        settings = replace(
            settings, plan=PlanRequest(residency="resident"), device_budget_bytes=spec.resident_bytes
        )
        trainer = _largest_that_fits(model, settings, subject.registry, make)
    else:
        trainer = _streaming(model, settings, make, result)
    plan = trainer.planned.plan
    whole = len(subject.model.meta.blocks)
    result |= {
        "num_blocks": len(trainer.model.meta.blocks),
        "whole_num_blocks": whole,
        "plan": flatten(plan),
        "num_steps": subject.steps.num_steps,
        "kernels": dict(trainer.model.meta.architecture.kernels()),
        "environment": environment(trainer.device),
        "fingerprint": trainer.fingerprint,
        "predicted_device_bytes": trainer.planned.prediction.device_bytes,
    }
    return trainer


def _drop_moment(optimizer: BankOptimizer) -> None:
    """Set the first moment to zero; of 8-bit codes by their scale, for no code of theirs is known to be zero here."""
    scale = f"{DROPPED_MOMENT}_absmax"
    for values in optimizer.moments(scale if scale in optimizer.quantities else DROPPED_MOMENT).values():
        values.zero_()


def _streaming(model: OpenModel, settings: RunSettings, make: Any, result: dict[str, Any]) -> Trainer:
    """Return the trainer of the user's plan, or, where that streams nothing, of one that does."""
    trainer: Trainer = make(model, settings)
    plan, count = trainer.planned.plan, len(model.meta.blocks)
    if plan.residency == "streamed" and plan.resident_blocks < count:
        return trainer
    trainer.close()
    result["plan_changed"] = (
        "The run's own plan keeps every block on the device, so there would be nothing to compare: this one streams."
    )
    streamed = replace(plan, residency="streamed", resident_blocks=0, kept_blocks=0)
    return make(model, replace(settings, plan=streamed, device_budget_bytes=None))


def _largest_that_fits(model: OpenModel, settings: RunSettings, registry: Registry, make: Any) -> Trainer:
    """Return the resident trainer of the whole model, or of the first half, quarter, ... of it.

    Raises:
        BudgetError: not even the smallest fits.
    """
    count = len(model.meta.blocks)
    while True:
        try:
            return make(
                model if count == len(model.meta.blocks) else cut_depth(model, count, registry), settings
            )
        except BudgetError:
            if count // 2 < LEAST_BLOCKS:
                raise
            count //= 2


def control_plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan of a fault's run: the same, with every block streamed through two slots."""
    return {**plan, "residency": "streamed", "num_slots": 2, "resident_blocks": 0, "kept_blocks": 0}


def plan_for_blocks(plan: Mapping[str, Any], num_blocks: int, whole: int) -> dict[str, Any]:
    """Return a streamed side's plan for the first ``num_blocks`` blocks."""
    return flatten(cut_plan(Plan(**plan), num_blocks, whole))
