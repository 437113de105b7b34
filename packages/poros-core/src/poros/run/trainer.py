"""The training loop: a pure function of the step's index over a `StepSource`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch

from poros import determinism
from poros.checkpoint import atomic_write_json, check_free_space, prepare_output_folder, prune
from poros.engine.engine import Engine
from poros.errors import BudgetError, ConfigError, UserError, explain
from poros.evidence import platform_status
from poros.interfaces import MicroBatch, StepSource
from poros.optimizer import BankOptimizer
from poros.planning.replay import timeline_record
from poros.run.checkpointing import find_checkpoint, restore_state, save_state, state_bytes
from poros.run.device import describe_device, refuse_many_processes, resolve_device, slow_arithmetic_notes
from poros.run.events import (
    CheckpointEvent,
    EvalEvent,
    Reporter,
    RunResult,
    StartEvent,
    StepEvent,
    WarmUpEvent,
)
from poros.run.final_adapter import ADAPTER_FOLDER, dry_save, save_final_adapter
from poros.run.fingerprint import compare_fingerprints, flatten
from poros.run.guards import check_first_gradients, check_step_finite
from poros.run.memory import context_bytes
from poros.run.metrics import METRICS_FILE, MetricsFile
from poros.run.opening import OpenModel
from poros.run.placement import plan_run
from poros.run.record import (
    REPORT_FILE,
    RUN_FILE,
    environment,
    failure_recorded,
    peak_host_bytes,
    planned_record,
)
from poros.run.settings import RunSettings
from poros.run.signals import stop_signals
from poros.run.totals import (
    Totals,
    group_for_evaluation,
    num_positions,
    shape_of,
    survey_steps,
)
from poros.units import list_terms

__all__ = ["Trainer"]

# What a run and its report write into the output folder, and what `overwrite` removes.
OWNED = ("checkpoints", ADAPTER_FOLDER, METRICS_FILE, RUN_FILE, REPORT_FILE)
# The first captures nothing: kernels run as they are. The second captures.
WARM_UP_PASSES = 2


class Trainer:
    """Trains the adapters of an open model.

    Making one checks everything that can be checked without reading weights; `run` does the rest. Use it as a context
    manager, or call `close`, to release page locks.

    Attributes:
        device: where the run computes.
        planned: where everything lives, and what that is predicted to need and to take.
        with_one_more_gb: what one more GB of device memory would buy.
        engine: the loaded model; set by `load`.
        notes: sentences that the user should see.
    """

    def __init__(
        self,
        model: OpenModel,
        steps: StepSource,
        settings: RunSettings,
        *,
        evaluation: Sequence[MicroBatch] = (),
        reporters: Sequence[Reporter] = (),
        data_record: Mapping[str, Any] | None = None,
        run_record: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the environment, the output folder, the checkpoint to resume from and the memory.

        Args:
            model: from `open_model`.
            steps: the micro-batches of every optimizer step.
            settings: of the run.
            evaluation: held-out micro-batches.
            reporters: receive events; ``metrics.jsonl`` is written anyway.
            data_record: what ``steps.fingerprint`` was made from, to explain a difference when resuming.
            run_record: what ``run.json`` shall hold besides, as JSON values.

        Raises:
            UserError: several processes, no such device, a used output folder, no checkpoint to resume from or one of
                another run, too little memory.
        """
        refuse_many_processes()
        self.device = resolve_device(settings.device)
        # Before anything runs on a GPU: the first cuBLAS call fixes its workspace.
        determinism.configure(self.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.model, self.steps, self.settings = model, steps, settings
        self.evaluation = tuple(evaluation)
        # With `overwrite`, nothing is removed until everything else is known to work.
        keep = settings.resume or settings.overwrite
        self.output = prepare_output_folder(Path(settings.output), resume=keep)
        self.fingerprint = self._fingerprint(data_record or {})
        self.notes = model.notes + slow_arithmetic_notes(self.device, model.numerics.compute_dtype)
        self._run_record = dict(run_record or {})
        self._resumed = self._find_checkpoint() if settings.resume else None
        self._largest, shape = survey_steps(steps, self.evaluation)
        self.planned, self.with_one_more_gb, notes = plan_run(model, settings, self.device, shape)
        self.notes += notes
        self._host_bytes_before = int(psutil.Process().memory_info().rss)
        self._context_bytes = 0
        if self.device.type == "cuda":
            # Never again: memory that captured graphs hold counts as reserved only.
            torch.cuda.reset_peak_memory_stats(self.device)
        self._metrics = MetricsFile(self.output / METRICS_FILE)
        self.reporters = (self._metrics, *reporters)
        self._engine: Engine | None = None
        self._optimizer: BankOptimizer | None = None
        self._totals = Totals()
        self._eval_loss: float | None = None
        self._checkpoint: Path | None = self._resumed[1] if self._resumed else None
        self._max_positions = 0
        self._stop = False

    def _fingerprint(self, data_record: Mapping[str, Any]) -> dict[str, Any]:
        model, settings = self.model, self.settings
        return flatten(
            {
                "model": {"architecture": model.meta.architecture.name, "weights": model.source.fingerprint},
                "quantization": model.weight_format.fingerprint(),
                "lora": {**flatten(model.lora), "targets": model.meta.targets},
                "numerics": model.numerics,
                "kernels": dict(model.meta.architecture.kernels()),
                "optimizer": settings.optimizer,
                "seed": settings.seed,
                "num_steps": self.steps.num_steps,
                "data": {**data_record, "steps": self.steps.fingerprint},
                "environment": environment(self.device),
            }
        )

    def _find_checkpoint(self) -> tuple[Any, Path]:
        state, path, notes = find_checkpoint(self.output)
        changed = compare_fingerprints(state.meta["fingerprint"], self.fingerprint, str(path))
        if state.step > self.steps.num_steps:
            raise ConfigError(
                explain(
                    "Cannot resume a longer run",
                    expected=f"at least {state.step} steps",
                    got=self.steps.num_steps,
                    where=str(path),
                    next_step="Raise `max_steps` or `epochs`",
                )
            )
        if changed:
            notes += (
                "Resumed with changed settings, so the run is not bitwise what it would have been: "
                + "; ".join(changed),
            )
        self.notes += notes
        return state, path

    # ---- life

    @property
    def engine(self) -> Engine:
        """The loaded engine; see `load`."""
        assert self._engine is not None, "call `load` first"
        return self._engine

    def load(self) -> Engine:
        """Quantize and load the weights, once; restore the checkpoint of a resumed run."""
        if self._engine is not None:
            return self._engine
        with self._explaining_out_of_memory():
            self._engine = self.model.load(
                plan=self.planned.plan,
                device=self.device,
                seed=self.settings.seed,
                progress=lambda done, total: self._tell("on_load", done, total),
                cache_dir=None
                if self.settings.cache_dir is None
                else Path(self.settings.cache_dir).expanduser(),
            )
            self._optimizer = BankOptimizer(
                self._engine.model.bank, self.settings.optimizer, self.steps.num_steps
            )
        if self._resumed is not None:
            state, path = self._resumed
            self.notes += restore_state(state, self._engine, self._optimizer, path)
        return self._engine

    def close(self) -> None:
        """Release page locks and the metrics file."""
        self._metrics.close()
        if self._engine is not None:
            self._engine.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def request_stop(self) -> None:
        """Ask the run to save and end after the optimizer step that is running."""
        self._stop = True

    # ---- the run

    def run(self) -> RunResult:
        """Train to the end, or until a signal or `request_stop`, and save.

        Raises:
            NonFiniteError: a loss, a gradient norm or a tensor to be saved is NaN or infinite.
            OutputError: the disk is full; earlier checkpoints are intact.
            CheckpointError: stock PEFT cannot read the final adapter.
            BudgetError: the device ran out of memory.
        """
        engine = self.load()
        first, total = self._resumed[0].step if self._resumed else 0, self.steps.num_steps
        self._prepare_output()
        record = {**self._record(), "first_step": first}
        atomic_write_json(self.output / RUN_FILE, record)
        self._tell("on_start", StartEvent(first_step=first, num_steps=total, record=record, notes=self.notes))
        done = first
        with (
            failure_recorded(self.output / RUN_FILE, record),
            stop_signals(self.request_stop),
            self._explaining_out_of_memory(),
        ):
            if first < total:
                self._warm_up(engine, first)
            while done < total and not self._stop:
                self._train_step(engine, done, is_first=done == first)
                done += 1
                if self._due(self.settings.eval_every, done, total):
                    self.evaluate(done)
                if self._due(self.settings.save_every, done, total) or self._stop:
                    self._save(done)
            if done == total:
                return self._finish(done, record)
            return self._conclude(self._result(done, interrupted=True), record)

    @staticmethod
    def _due(every: int | None, done: int, total: int) -> bool:
        return done == total or (every is not None and done % every == 0)

    def _warm_up(self, engine: Engine, index: int) -> None:
        """Run the largest step twice before the first one, so that what will not fit fails now.

        It changes no bit: gradients start from zero in every step, the generator's state is put back, and neither the
        weights nor the optimizer is touched.
        """
        wanted = self.device.type == "cuda" if self.settings.warm_up is None else self.settings.warm_up
        if not wanted:
            return
        start = time.perf_counter()
        for _ in range(WARM_UP_PASSES):
            output = engine.step(self._largest, index)
            torch.stack(output.losses).tolist()  # waits for the device
        engine.take_statistics()  # its copies are not the first step's
        self._measure_context()
        self._tell(
            "on_warm_up",
            WarmUpEvent(
                tokens=num_positions(self._largest),
                longest=shape_of(self._largest).tokens,
                seconds=time.perf_counter() - start,
                peak_device_bytes=self._peak_device_bytes(),
            ),
        )

    def _train_step(self, engine: Engine, index: int, *, is_first: bool) -> None:
        assert self._optimizer is not None
        start = time.perf_counter()
        micro_batches = self.steps.step(index)
        output = engine.step(micro_batches, index)
        norm = self._optimizer.clip()
        # The one point of the step where the host waits for the device.
        *losses, grad_norm = torch.stack([*output.losses, norm]).tolist()
        check_step_finite(
            losses, grad_norm, micro_batches=micro_batches, step=index + 1, checkpoint=self._checkpoint
        )
        if is_first:
            check_first_gradients(engine.model.bank)
            self._measure_context()
        copies = engine.take_statistics()
        learning_rate = self._optimizer.learning_rate
        self._optimizer.step()
        seconds = time.perf_counter() - start
        tokens = num_positions(micro_batches)
        self._max_positions = max(self._max_positions, tokens)
        event = StepEvent(
            step=index + 1,
            loss=sum(losses),
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            tokens=tokens,
            supervised_tokens=output.supervised_tokens,
            seconds=seconds,
            tokens_per_second=tokens / seconds,
            h2d_bytes=copies.h2d_bytes,
            exposed_copy_seconds=copies.exposed_copy_seconds,
            peak_device_bytes=self._peak_device_bytes(),
            grown_host_bytes=max(0, int(psutil.Process().memory_info().rss) - self._host_bytes_before),
        )
        self._totals.add(event)
        self._tell("on_step", event)

    def evaluate(self, step: int = 0) -> EvalEvent | None:
        """Return the loss per supervised token of the held-out rows, or None without any. Changes no training bit.

        Args:
            step: how many optimizer steps are done, for the reporters.
        """
        if not self.evaluation:
            return None
        engine = self.load()
        start = time.perf_counter()
        total, count = 0.0, 0
        for group in group_for_evaluation(self.evaluation, self._max_positions):
            loss_sum, supervised = engine.evaluate(group)
            total, count = total + loss_sum, count + supervised
        if count == 0:
            raise UserError(
                explain("Nothing to evaluate", expected="supervised tokens in the held-out rows", got="none")
            )
        engine.take_statistics()  # an evaluation's copies are not the next step's
        event = EvalEvent(
            step=step,
            eval_loss=total / count,
            eval_supervised_tokens=count,
            eval_seconds=time.perf_counter() - start,
        )
        self._eval_loss = event.eval_loss
        self._tell("on_eval", event)
        return event

    # ---- saving

    def _prepare_output(self) -> None:
        """Empty a folder that is to be overwritten, and prove that a save works before the first step."""
        assert self._optimizer is not None
        if self.settings.overwrite:
            prepare_output_folder(self.output, overwrite=True, owned=OWNED)
        # One more than is kept: the oldest goes only when the newest is complete.
        needed = (self.settings.keep_checkpoints + 1) * state_bytes(self.engine, self._optimizer)
        check_free_space(self.output, needed, "the run's checkpoints")
        dry_save(self.output, self.model, self.engine)

    def _save(self, step: int) -> None:
        assert self._optimizer is not None
        start = time.perf_counter()
        meta = {"fingerprint": self.fingerprint}
        self._checkpoint = save_state(self.output, step, self.engine, self._optimizer, meta)
        prune(self.output, self.settings.keep_checkpoints)
        self._tell(
            "on_checkpoint",
            CheckpointEvent(step=step, path=self._checkpoint, seconds=time.perf_counter() - start),
        )

    def _finish(self, done: int, record: dict[str, Any]) -> RunResult:
        adapter, report = save_final_adapter(self.output, self.model, self.engine)
        result = self._result(done, interrupted=False, adapter=adapter, adapter_report=report)
        return self._conclude(result, record)

    def _conclude(self, result: RunResult, record: dict[str, Any]) -> RunResult:
        atomic_write_json(self.output / RUN_FILE, {**record, "result": flatten(result)})
        self._tell("on_end", result)
        return result

    def _record(self) -> dict[str, Any]:
        model, settings = self.model, self.settings
        timeline = timeline_record(model.meta, model.numerics, self.planned, self.device.type)
        return {
            **self._run_record,
            "model": {
                "name": model.name,
                "architecture": model.meta.architecture.name,
                "status": model.verdict.status,
                "registered_by": model.verdict.distribution,
                "receipts": [flatten(receipt) for receipt in model.verdict.receipts],
                "platform": platform_status(model.verdict.receipts, self.device),
            },
            "num_blocks": len(model.meta.blocks),
            "device": describe_device(self.device),
            "fingerprint": self.fingerprint,
            **planned_record(self.planned, self.with_one_more_gb),
            "predicted_timeline": timeline,
            "settings": flatten(settings),
            "notes": list(self.notes),
        }

    def _result(self, done: int, *, interrupted: bool, **adapter: Any) -> RunResult:
        totals = self._totals
        return RunResult(
            steps=done,
            interrupted=interrupted,
            adapter=adapter.get("adapter"),
            adapter_report=adapter.get("adapter_report"),
            checkpoint=self._checkpoint,
            first_loss=totals.first_loss,
            last_loss=totals.last_loss,
            eval_loss=self._eval_loss,
            tokens=totals.tokens,
            supervised_tokens=totals.supervised_tokens,
            seconds=totals.seconds,
            h2d_bytes=totals.h2d_bytes,
            exposed_copy_seconds=totals.exposed_copy_seconds,
            peak_device_bytes=self._peak_device_bytes(),
            peak_host_bytes=peak_host_bytes(),
            grown_host_bytes=max(0, peak_host_bytes() - self._host_bytes_before),
            step_seconds=totals.median_seconds(),
            predicted_device_bytes=self.planned.prediction.device_bytes,
            predicted_host_bytes=self.planned.prediction.host_bytes,
            predicted_step_seconds=self.planned.time.seconds,
        )

    # ---- helpers

    def _peak_device_bytes(self) -> int | None:
        """Return context and highest reservation, which is what the card had to have."""
        if self.device.type != "cuda":
            return None
        return self._context_bytes + torch.cuda.max_memory_reserved(self.device)

    def _measure_context(self) -> None:
        """Once graphs are captured and modules loaded, look at what the process holds besides its allocator."""
        if self.device.type == "cuda":
            self._context_bytes = context_bytes(self.device)

    def _describe_largest(self) -> str:
        shape = shape_of(self._largest)
        rows = [row for batch in self._largest for row in getattr(batch, "row_ids", ())]
        named = f", rows {rows}" if rows else ""
        size = f"{shape.micro_batch_size} x {shape.tokens}"
        return f"{shape.num_micro_batches} micro-batches of up to {size} tokens{named}"

    def _tell(self, method: str, *arguments: Any) -> None:
        for reporter in self.reporters:
            getattr(reporter, method)(*arguments)

    @contextlib.contextmanager
    def _explaining_out_of_memory(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                explain(
                    f"{describe_device(self.device)} ran out of memory",
                    expected=f"room for what was predicted: {list_terms(self.planned.prediction.device)}",
                    got=" ".join(str(error).split()),
                    where=f"the largest step: {self._describe_largest()}",
                    next_step="Lower `micro_batch_size`, `max_length` or `vram`; the last checkpoint is "
                    + (f"{self._checkpoint}" if self._checkpoint else "none yet"),
                )
            ) from error
