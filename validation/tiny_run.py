"""A tiny `poros train` that is forked again and again: what it needs on the disk, and how it is started.

A server that has imported everything and run nothing does the forking: a process in which autograd has threads, as that
of a test runner or of any machine with a GPU, cannot be forked and then train.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from file_faults import Call, FileFaults, area_of, kill
from tiny_model import write_tiny_model

# Of `Engine.step` and the like: patched per child, never here.
import poros.planning.working_set as working_set
import poros.run.trainer as trainer_module
from poros_cli.main import run

__all__ = ["Child", "Ended", "Fault", "prepare", "start"]

FORKS = multiprocessing.get_context("forkserver")
# With what a child would import by itself, each one anew.
FORKS.set_forkserver_preload(
    [
        "__main__",
        "tiny_run",
        "poros.wrappers",
        "poros_cli.assemble",
        "transformers.models.qwen2.modeling_qwen2",
    ]
)

# Of a run that takes one or two; the machine may be busy.
MAX_SECONDS, MAX_SECONDS_TO_END = 300.0, 30.0
NUM_STEPS = 6
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SETTINGS = (
    *("--device", "cpu", "--micro-batches", "2", "--rank", "4", "--dropout", "0.1", "--max-length", "64"),
    *(
        "--max-steps",
        str(NUM_STEPS),
        "--save-every",
        "2",
        "--set",
        "eval_fraction=0.2",
        "--set",
        "eval_every=2",
    ),
    *("--set", "keep_best=true", "--set", "keep_checkpoints=2", "--set", "numerics.compute_dtype=float32"),
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is to happen to a child.

    Attributes:
        at: number of the file call to act at.
        act: at that call.
        area: part of the run in which the clock kills: ``step``, ``evaluation``, ``save`` or ``anywhere``.
        visit: which of its calls.
        delay: seconds from its beginning.
        predicts: predict what a visit needs for real, a second of every start.
        before: called in the child before the run begins; pickled on the way, as ``act`` is.
    """

    at: int | None = None
    act: Callable[[int, Call], None] = kill
    area: str | None = None
    visit: int = 0
    delay: float = 0.0
    predicts: bool = False
    before: Callable[[], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a child ended.

    Attributes:
        code: exit code; None was killed.
        shown: what it printed.
        hit: the area in which the fault hit, and the file call; None where it did not.
        saved: steps of the checkpoints that it announced.
        calls: file calls, of a child that was to count them.
        seconds: wall time.
    """

    code: int | None
    shown: str
    hit: tuple[str, str] | None
    saved: tuple[int, ...]
    calls: tuple[Call, ...]
    seconds: float


def prepare(folder: Path) -> None:
    """Write a tiny model with its tokenizer, and rows, below ``folder``."""
    write_tiny_model(folder / "model", num_blocks=3, template=TEMPLATE)
    rows = [{"prompt": f"Say {index}", "completion": f"It is {index}."} for index in range(15)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class Child:
    """A forked process that trains; `wait` for it, within a context that lets none stay."""

    def __init__(self, home: Path, folder: Path, more: tuple[str, ...], fault: Fault, count: bool) -> None:
        """Fork it; see `start`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder.with_name(folder.name + ".log")
        self._told, telling = FORKS.Pipe(duplex=False)
        self._begun = time.monotonic()
        self._process = FORKS.Process(
            target=_child, args=(home, folder, more, fault, count, telling, self._log)
        )
        with _importable_here():
            self._process.start()
        telling.close()

    def __enter__(self) -> Child:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it where nobody waited."""
        self._process.kill()
        self._process.join()
        self._told.close()

    def wait(self) -> Ended:
        """Return how it ended.

        Raises:
            AssertionError: it hangs.
        """
        told = []
        with contextlib.suppress(EOFError):
            while self._told.poll(max(0.0, self._begun + MAX_SECONDS - time.monotonic())):
                told.append(json.loads(self._told.recv_bytes()))
        self._process.join(MAX_SECONDS_TO_END)
        assert self._process.exitcode is not None, f"still running: {self._log.read_text()}"
        code = self._process.exitcode
        if code is not None and code < 0 and code != -signal.SIGKILL:
            raise AssertionError(f"ended by signal {-code}: {self._log.read_text()}")
        return Ended(
            code=None if code == -signal.SIGKILL else code,
            shown=self._log.read_text(),
            hit=next((tuple(line["hit"]) for line in told if "hit" in line), None),  # type: ignore[arg-type]
            saved=tuple(line["saved"] for line in told if "saved" in line),
            calls=tuple(tuple(call) for line in told for call in line.get("calls", ())),  # type: ignore[misc]
            seconds=time.monotonic() - self._begun,
        )


def start(home: Path, folder: Path, *more: str, fault: Fault | None = None, count: bool = False) -> Ended:
    """Fork a child that trains in ``folder/output`` with ``folder/cache``, and wait for its end.

    Args:
        home: what `prepare` has filled.
        folder: of the run; file calls below it count.
        more: arguments of `poros train`.
        fault: what happens to the child.
        count: return its file calls.
    """
    with Child(home, folder, more, fault or Fault(), count) as child:
        return child.wait()


@contextlib.contextmanager
def _importable_here() -> Iterator[None]:
    """Let a server that starts now find what this process finds."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _child(
    home: Path, folder: Path, more: tuple[str, ...], fault: Fault, count: bool, pipe: Connection, log: Path
) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    warnings.resetwarnings()
    warnings.simplefilter("ignore", FutureWarning)
    warnings.showwarning = lambda message, *_, **__: print(f"Warning: {message}", file=sys.stderr)

    def tell(value: Mapping[str, Any]) -> None:
        pipe.send_bytes(json.dumps(value).encode())

    torch.manual_seed(os.getpid())  # a fresh process has another generator state
    if not fault.predicts:
        working_set._simulate = lambda *_: (2**20, 2**20)  # type: ignore[assignment]
    _announce_saves(tell)
    areas = _AreaClock(fault, tell)
    if fault.before is not None:
        fault.before()
    faults = FileFaults(
        folder,
        at=fault.at,
        act=fault.act,
        told=lambda number, call: tell({"hit": [area_of(call), " ".join(call)]}),
    )
    if fault.at is not None or count:
        faults.install()
    areas.begin()
    names = ("--model", str(home / "model"), "--data", str(home / "rows.jsonl"))
    places = ("--output", str(folder / "output"), "--set", f"cache_dir={folder / 'cache'}")
    code = run(["train", *names, *places, *SETTINGS, *more])
    sys.stdout.flush()
    sys.stderr.flush()
    if count:
        tell({"calls": faults.calls})
    os._exit(code)


def _announce_saves(tell: Callable[[Mapping[str, Any]], None]) -> None:
    """Say when a checkpoint is said to be complete."""
    save = trainer_module.save_state

    def announced(output: Path, step: int, *rest: Any) -> Path:
        path = save(output, step, *rest)
        tell({"saved": step})
        return path

    trainer_module.save_state = announced


class _AreaClock:
    """Kills a while after one visit of a part of the run has begun."""

    def __init__(self, fault: Fault, tell: Callable[[Mapping[str, Any]], None]) -> None:
        self._fault, self._tell = fault, tell
        self._now = ["start"]
        self._visits = 0
        if fault.area is None:
            return
        trainer = trainer_module.Trainer
        trainer._train_step = self._around("step", trainer._train_step)  # type: ignore[method-assign]
        trainer._evaluate = self._around("evaluation", trainer._evaluate)  # type: ignore[method-assign]
        trainer._save = self._around("save", trainer._save)  # type: ignore[method-assign]
        trainer_module.prune = self._around("pruning", trainer_module.prune)
        trainer_module.save_final_adapter = self._around("final adapter", trainer_module.save_final_adapter)

    def begin(self) -> None:
        """Start the clock of a kill anywhere."""
        if self._fault.area == "anywhere":
            self._start()

    def _around(self, area: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with self._inside(area):
                return original(*arguments, **options)

        return call

    @contextlib.contextmanager
    def _inside(self, area: str) -> Iterator[None]:
        self._now.append(area)
        if area == self._fault.area:
            if self._visits == self._fault.visit:
                self._start()
            self._visits += 1
        yield
        self._now.pop()

    def _start(self) -> None:
        threading.Thread(target=self._kill, daemon=True).start()

    def _kill(self) -> None:
        time.sleep(self._fault.delay)
        self._tell({"hit": [self._now[-1], "by the clock"]})
        os.kill(os.getpid(), signal.SIGKILL)
