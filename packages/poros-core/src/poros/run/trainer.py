"""The training loop: a pure function of the step's index over a `StepSource`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from poros import determinism
from poros.checkpoint import (
    atomic_write_json,
    check_free_space,
    checkpoint_folder,
    prepare_output_folder,
    prune,
)
from poros.checkpoint.atomic import sweep_leftovers
from poros.checkpoint.folder_lock import holding_output, refuse_used_folder
from poros.clock import Stopwatch, per_second
from poros.engine.engine import Engine
from poros.interfaces import MicroBatch, StepSource
from poros.optimizer import BankOptimizer, check_optimizer
from poros.plugins import Registered
from poros.run.audience import Audience
from poros.run.calendar import Calendar
from poros.run.checkpointing import continued_run, restore_state, save_state, state_bytes, weights_of
from poros.run.device import refuse_many_processes, resolve_device, slow_arithmetic_notes
from poros.run.evaluating import SamplePrompts, answer_prompts, evaluate_rows
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
from poros.run.fingerprint import flatten
from poros.run.guards import check_first_gradients, check_step_finite, explaining_out_of_memory
from poros.run.metrics import METRICS_FILE, SAMPLES_FILE, record_files
from poros.run.opening import OpenModel
from poros.run.outcome import MemoryUse, make_result
from poros.run.placement import plan_run
from poros.run.record import (
    REPORT_FILE,
    RUN_FILE,
    failure_recorded,
    fingerprint_record,
    model_record,
    planned_record,
)
from poros.run.selection import BEST_FILE, continued_selection, write_best
from poros.run.settings import RunSettings
from poros.run.signals import stop_signals
from poros.run.spill import spill_watches
from poros.run.totals import Totals, num_positions, shape_of, survey_steps

__all__ = ["Trainer"]

# What a run and its report write into the output folder, and what `overwrite` removes.
OWNED = ("checkpoints", ADAPTER_FOLDER, METRICS_FILE, SAMPLES_FILE, BEST_FILE, RUN_FILE, REPORT_FILE)
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
        samples: SamplePrompts | None = None,
        reporters: Sequence[Reporter | Registered[Reporter]] = (),
        data_record: Mapping[str, Any] | None = None,
        run_record: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the environment, the output folder, the checkpoint to resume from and the memory.

        Args:
            model: from `open_model`.
            steps: the micro-batches of every optimizer step.
            settings: of the run.
            evaluation: held-out micro-batches.
            samples: prompts that are answered from time to time.
            reporters: receive events; ``metrics.jsonl`` is written anyway. What one of them raises never ends the run.
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
        check_optimizer(settings.optimizer, steps.num_steps)
        self.evaluation, self._samples = tuple(evaluation), samples
        # With `overwrite`, nothing is removed until everything else is known to work.
        keep = settings.resume or settings.overwrite
        self.output = prepare_output_folder(Path(settings.output), resume=keep)
        refuse_used_folder(self.output)
        self.fingerprint = fingerprint_record(model, steps, settings, data_record or {}, self.device)
        self.notes = model.notes + slow_arithmetic_notes(self.device, model.numerics.compute_dtype)
        self._run_record = dict(run_record or {})
        self._resumed = None
        if settings.resume:
            state, path, notes = continued_run(self.output, self.fingerprint, steps.num_steps)
            self._resumed, self.notes = (state, path), self.notes + notes
        self._selection, notes = continued_selection(
            self.evaluation, settings, self.output, None if self._resumed is None else self._resumed[0].meta
        )
        self.notes += notes
        self._largest, shape = survey_steps(steps, self.evaluation)
        self.planned, self.with_one_more_gb, notes = plan_run(model, settings, self.device, shape)
        self.notes += notes
        self._memory = MemoryUse(self.device)
        self._calendar = Calendar(
            settings=settings,
            num_steps=steps.num_steps,
            has_rows=bool(self.evaluation),
            has_prompts=samples is not None,
        )
        own = record_files(self.output, samples=samples is not None)
        watches = spill_watches(self.device, lambda sentence: self._audience.say(sentence))
        self._audience = Audience((*own, *watches), reporters, self.device)
        self._record: dict[str, Any] = {}
        self._noted = 0
        self._engine: Engine | None = None
        self._optimizer: BankOptimizer | None = None
        self._totals = Totals()
        self._checkpoint: Path | None = self._resumed[1] if self._resumed else None
        self._saved_step = self._resumed[0].step if self._resumed else None
        self._max_positions = 0
        self._stop = False

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
                progress=lambda done, total: self._audience.tell("on_load", done, total),
                cache_dir=None
                if self.settings.cache_dir is None
                else Path(self.settings.cache_dir).expanduser(),
            )
            self._optimizer = BankOptimizer(
                self._engine.model.bank, self.settings.optimizer, self.steps.num_steps
            )
        # torch seeds a new process's generator as it likes; its state is part of a checkpoint and of what repeats.
        determinism.default_generator(self.device).manual_seed(self.settings.seed)
        if self._resumed is not None:
            state, path = self._resumed
            self.notes += restore_state(state, self._engine, self._optimizer, path)
        return self._engine

    def close(self) -> None:
        """Release page locks, the files of the run and what reporters hold."""
        self._audience.tell("on_close")
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

    @holding_output
    def run(self) -> RunResult:
        """Train to the end, or until a signal or `request_stop`, and save.

        Raises:
            NonFiniteError: a loss, a gradient norm or a tensor to be saved is NaN or infinite.
            OutputError: another run uses the output folder, or the disk is full; earlier checkpoints are intact.
            CheckpointError: stock PEFT cannot read the final adapter.
            BudgetError: the device ran out of memory.
        """
        engine = self.load()
        first, total = self._resumed[0].step if self._resumed else 0, self.steps.num_steps
        self._prepare_output()
        self._record = {
            **self._run_record,
            **model_record(self.model, self.device),
            **planned_record(self.model, self.planned, self.with_one_more_gb, self.device),
            "fingerprint": self.fingerprint,
            "settings": flatten(self.settings),
            "first_step": first,
        }
        self._write_record()
        write_best(self.output, self._selection if self.settings.keep_best else None)
        notes = (*self.notes, *self._audience.notes)
        self._audience.tell(
            "on_start", StartEvent(first_step=first, num_steps=total, record=self._record, notes=notes)
        )
        done = first
        with (
            failure_recorded(lambda reason: self._write_record(failure=reason)),
            stop_signals(self.request_stop),
            self._explaining_out_of_memory(),
        ):
            if first < total:
                self._warm_up(engine, first)
            # What a signal put off, and the answers before the first step.
            early = self._after_step(engine, done)
            while done < total and not early and not self._stop:
                self._train_step(engine, done, is_first=done == first)
                done += 1
                early = self._after_step(engine, done)
            if self._calendar.ends(done, self._selection):
                return self._finish(done, early)
            return self._conclude(self._result(done, interrupted=True))

    def _after_step(self, engine: Engine, done: int) -> bool:
        """Evaluate, answer and save as far as it is due after ``done`` steps; return whether to stop early.

        A signal puts off what is not finished: the checkpoint comes first, and the resumed run makes up for it.
        """
        calendar, chosen = self._calendar, self._selection
        best, news = False, self._saved_step != done
        event = self._evaluate(engine, done, lambda: self._stop) if calendar.evaluates(done, chosen) else None
        if event is not None:
            best = chosen.add(done, event.eval_loss, self.settings.early_stop_min_delta)
            news = True
        if calendar.answers(done, chosen) and self._answer(engine, done):
            chosen.sampled = done
            news = True
        early = calendar.stops(chosen)
        due = calendar.saves(done) or early or self._stop
        if (news and due) or (best and self.settings.keep_best):
            self._save(done)
        if self._audience.notes[self._noted :]:
            self._write_record()
        return early

    def _warm_up(self, engine: Engine, index: int) -> None:
        """Run the largest step twice before the first one, so that what will not fit fails now.

        It changes no bit: gradients start from zero in every step, the generator's state is put back, and neither the
        weights nor the optimizer is touched.
        """
        wanted = self.device.type == "cuda" if self.settings.warm_up is None else self.settings.warm_up
        if not wanted:
            return
        watch = Stopwatch()
        for _ in range(WARM_UP_PASSES):
            output = engine.step(self._largest, index)
            torch.stack(output.losses).tolist()  # waits for the device
        engine.take_statistics()  # its copies are not the first step's
        self._memory.measure_context()
        self._audience.tell(
            "on_warm_up",
            WarmUpEvent(
                tokens=num_positions(self._largest),
                longest=shape_of(self._largest).tokens,
                seconds=watch.seconds,
                peak_device_bytes=self._memory.peak_device_bytes(),
            ),
        )

    def _train_step(self, engine: Engine, index: int, *, is_first: bool) -> None:
        assert self._optimizer is not None
        watch = Stopwatch()
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
            self._memory.measure_context()
        copies = engine.take_statistics()
        learning_rate = self._optimizer.learning_rate
        self._optimizer.step()
        seconds = watch.seconds
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
            tokens_per_second=per_second(tokens, seconds),
            h2d_bytes=copies.h2d_bytes,
            exposed_copy_seconds=copies.exposed_copy_seconds,
            peak_device_bytes=self._memory.peak_device_bytes(),
            grown_host_bytes=self._memory.grown_host_bytes(),
        )
        self._totals.add(event)
        self._audience.tell("on_step", event)

    def evaluate(self, step: int = 0) -> EvalEvent | None:
        """Return the loss per supervised token of the held-out rows, or None without any. Changes no training bit.

        Args:
            step: how many optimizer steps are done, for the reporters.
        """
        return self._evaluate(self.load(), step, lambda: False) if self.evaluation else None

    def _evaluate(self, engine: Engine, step: int, stopping: Callable[[], bool]) -> EvalEvent | None:
        event = evaluate_rows(
            engine,
            self.evaluation,
            step=step,
            max_positions=self._max_positions,
            checkpoint=self._checkpoint,
            stopping=stopping,
        )
        if event is not None:
            self._audience.tell("on_eval", event)
        return event

    def _answer(self, engine: Engine, step: int) -> bool:
        """Answer the sample prompts; return False if a signal came before the last of them."""
        assert self._samples is not None
        events = answer_prompts(engine, self._samples, step=step, stopping=lambda: self._stop)
        for event in events or ():
            self._audience.tell("on_sample", event)
        return events is not None

    # ---- saving

    def _prepare_output(self) -> None:
        """Empty a folder that is to be overwritten, and prove that a save works before the first step."""
        assert self._optimizer is not None
        sweep_leftovers(self.output)
        if self.settings.overwrite:
            owned = (*OWNED, *self._audience.owned())
            prepare_output_folder(self.output, overwrite=True, owned=owned)
        # One more than is kept: the oldest goes only when the newest is complete.
        needed = (self.settings.keep_checkpoints + 1 + self.settings.keep_best) * state_bytes(
            self.engine, self._optimizer
        )
        check_free_space(self.output, needed, "the run's checkpoints")
        dry_save(self.output, self.model, self.engine)
        if self._resumed is not None:
            self._prune(self._resumed[0].step)  # what a killed run saved and had no time to prune

    def _save(self, step: int) -> None:
        assert self._optimizer is not None
        watch = Stopwatch()
        meta = {"fingerprint": self.fingerprint, "selection": self._selection.record()}
        self._checkpoint = save_state(self.output, step, self.engine, self._optimizer, meta)
        self._saved_step = step
        if self.settings.keep_best:
            # Named before what was best until now may go.
            write_best(self.output, self._selection)
        self._prune(step)
        self._audience.tell(
            "on_checkpoint", CheckpointEvent(step=step, path=self._checkpoint, seconds=watch.seconds)
        )

    def _prune(self, step: int) -> None:
        spared = self._selection.best_step if self.settings.keep_best else None
        prune(self.output, self.settings.keep_checkpoints, spared=spared, newest=step)

    def _finish(self, done: int, early: bool) -> RunResult:
        step, lent = done, contextlib.ExitStack()
        if self.settings.keep_best and self._selection.best_step not in (None, done):
            step = int(self._selection.best_step or 0)
            lent.enter_context(weights_of(checkpoint_folder(self.output, step), self.engine))
        with lent:
            adapter, report = save_final_adapter(self.output, self.model, self.engine)
        made = {"adapter": adapter, "adapter_report": report, "adapter_step": step, "stopped_early": early}
        return self._conclude(self._result(done, interrupted=False, **made))

    def _conclude(self, result: RunResult) -> RunResult:
        self._write_record(result=flatten(result))
        self._audience.tell("on_end", result)
        if self._audience.notes[self._noted :]:
            self._write_record(result=flatten(result))
        return result

    def _write_record(self, **more: Any) -> None:
        """Write ``run.json``, with what the reporters' faults have to say by now."""
        self._noted = len(self._audience.notes)
        notes = [*self.notes, *self._audience.notes]
        atomic_write_json(self.output / RUN_FILE, {**self._record, "notes": notes, **more})

    def _result(self, done: int, *, interrupted: bool, **made: Any) -> RunResult:
        return make_result(
            done,
            interrupted=interrupted,
            totals=self._totals,
            chosen=self._selection,
            memory=self._memory,
            planned=self.planned,
            checkpoint=self._checkpoint,
            **made,
        )

    def _explaining_out_of_memory(self) -> AbstractContextManager[None]:
        return explaining_out_of_memory(self.device, self.planned, self._largest, lambda: self._checkpoint)
