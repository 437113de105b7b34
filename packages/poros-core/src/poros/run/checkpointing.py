"""What a checkpoint of a run holds, and putting it back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from poros.checkpoint import RunState, load_run_state, newest_complete, save_run_state
from poros.determinism import default_generator
from poros.engine.engine import Engine
from poros.errors import CheckpointError, ConfigError, OutputError, explain
from poros.optimizer import BankOptimizer
from poros.run.fingerprint import compare_fingerprints

__all__ = ["continued_run", "find_checkpoint", "restore_state", "save_state", "state_bytes", "weights_of"]

WEIGHTS = "weights"
OPTIMIZER = "optimizer"
GENERATOR = "generator"


def _state_tensors(engine: Engine, optimizer: BankOptimizer) -> dict[str, torch.Tensor]:
    """Return the live tensors of a run by name; the generator's state is a copy."""
    bank = engine.model.bank
    return {
        **{f"{WEIGHTS}.{group}": weights for group, weights in bank.weights.items()},
        **{f"{OPTIMIZER}.{name}": value for name, value in optimizer.state_tensors().items()},
        f"{GENERATOR}.{engine.device.type}": default_generator(engine.device).get_state(),
    }


def state_bytes(engine: Engine, optimizer: BankOptimizer) -> int:
    """Return the bytes of one checkpoint."""
    return sum(tensor.nbytes for tensor in _state_tensors(engine, optimizer).values())


def save_state(
    output: Path, step: int, engine: Engine, optimizer: BankOptimizer, meta: Mapping[str, Any]
) -> Path:
    """Save a checkpoint after ``step`` steps and return its folder; see `save_run_state` for errors."""
    return save_run_state(output, step, _state_tensors(engine, optimizer), meta)


def find_checkpoint(output: Path) -> tuple[RunState, Path, tuple[str, ...]]:
    """Load the newest complete checkpoint of a run; return it, its folder and a note per damaged newer one.

    Raises:
        OutputError: there is none.
    """
    path, skipped = newest_complete(output)
    notes = tuple(f"Skipped the damaged checkpoint {folder}: {reason}" for folder, reason in skipped)
    if path is None:
        raise OutputError(
            explain(
                "Cannot resume",
                expected="a complete checkpoint",
                got=" ".join(notes) or "none",
                where=str(output),
                next_step="Start anew with `--overwrite` in place of `--resume`",
            )
        )
    return load_run_state(path), path, notes


def continued_run(
    output: Path, fingerprint: Mapping[str, Any], num_steps: int
) -> tuple[RunState, Path, tuple[str, ...]]:
    """Return the checkpoint that a run with these settings goes on from, its folder, and notes.

    Raises:
        OutputError: there is none.
        ConfigError: it is of another run, or of a longer one.
    """
    state, path, notes = find_checkpoint(output)
    changed = compare_fingerprints(state.meta["fingerprint"], fingerprint, str(path))
    if state.step > num_steps:
        raise ConfigError(
            explain(
                "Cannot resume a longer run",
                expected=f"at least {state.step} steps",
                got=num_steps,
                where=str(path),
                next_step="Raise `max_steps` or `epochs`",
            )
        )
    if changed:
        notes += (
            "Resumed with changed settings, so the run is not bitwise what it would have been: "
            + "; ".join(changed),
        )
    return state, path, notes


def _form(tensor: torch.Tensor) -> str:
    return f"shape {list(tensor.shape)} and dtype {str(tensor.dtype).removeprefix('torch.')}"


def restore_state(state: RunState, engine: Engine, optimizer: BankOptimizer, where: Path) -> tuple[str, ...]:
    """Put a checkpoint's values into the engine's bank, the optimizer and the device's generator.

    Returns:
        A note where something could not be continued: another kind of device has another generator.

    Raises:
        CheckpointError: a tensor is missing or has another shape or dtype than this run's.
    """
    wanted = _state_tensors(engine, optimizer)
    generator = f"{GENERATOR}.{engine.device.type}"
    for name, tensor in wanted.items():
        found = state.tensors.get(name)
        if name != generator and (found is None or _form(found) != _form(tensor)):
            raise CheckpointError(
                explain(
                    "The checkpoint does not fit this run",
                    expected=f"`{name}` of {_form(tensor)}",
                    got="none" if found is None else _form(found),
                    where=str(where),
                )
            )
    for group, weights in engine.model.bank.weights.items():
        weights.copy_(state.tensors[f"{WEIGHTS}.{group}"])
    prefix = f"{OPTIMIZER}."
    optimizer.load_state(
        {n.removeprefix(prefix): t for n, t in state.tensors.items() if n.startswith(prefix)}, state.step
    )
    if generator not in state.tensors:
        return ("The checkpoint comes from another kind of device: its random state is not continued.",)
    default_generator(engine.device).set_state(state.tensors[generator])
    return ()


@contextlib.contextmanager
def weights_of(path: Path, engine: Engine) -> Iterator[None]:
    """Lend the engine the adapter of a checkpoint of this run.

    Raises:
        CheckpointError: a file is missing, truncated or changed.
    """
    try:
        state = load_run_state(path)
    except CheckpointError as error:
        raise CheckpointError(
            f"The best checkpoint cannot be read: {error} `--resume` with `keep_best: false` saves the last adapter."
        ) from error
    weights = engine.model.bank.weights
    last = {group: values.to("cpu", copy=True) for group, values in weights.items()}
    try:
        for group, values in weights.items():
            values.copy_(state.tensors[f"{WEIGHTS}.{group}"])
        yield
    finally:
        for group, values in weights.items():
            values.copy_(last[group])
