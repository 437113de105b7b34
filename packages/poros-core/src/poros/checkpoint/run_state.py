"""Checkpoints of a run: safetensors and JSON only, one complete folder per saved step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from poros.checkpoint.atomic import (
    atomic_folder,
    atomic_write_json,
    remove_folder,
    restore_interrupted,
    sweep_leftovers,
)
from poros.checkpoint.json_files import read_json_object
from poros.checkpoint.manifest import check_manifest
from poros.checkpoint.tensor_file import check_finite, load_tensors, save_tensors
from poros.errors import CheckpointError, explain

__all__ = ["RunState", "checkpoint_folder", "load_run_state", "newest_complete", "prune", "save_run_state"]

CHECKPOINTS_FOLDER = "checkpoints"
TENSORS_FILE = "state.safetensors"
META_FILE = "state.json"
STEP_FOLDER = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """What a run continues from.

    Attributes:
        step: optimizer steps that are done.
        tensors: adapter, moments, generator states, ... on the CPU.
        meta: everything else, as JSON holds it (tuples come back as lists).
    """

    step: int
    tensors: Mapping[str, torch.Tensor]
    meta: Mapping[str, Any]


def checkpoint_folder(run_folder: Path, step: int) -> Path:
    """Return where the checkpoint after ``step`` optimizer steps lies, if there is one."""
    return run_folder / CHECKPOINTS_FOLDER / f"step-{step:06d}"


def save_run_state(
    run_folder: Path, step: int, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]
) -> Path:
    """Save a checkpoint after ``step`` optimizer steps and return its folder.

    A folder of the same step is replaced: a run that resumed from an earlier one writes it again.

    Raises:
        NonFiniteError: a tensor holds NaN or infinity.
        OutputError: the disk is full or refuses the write; earlier checkpoints are intact.
        ValueError: ``meta`` holds NaN or infinity.
    """
    check_finite(tensors, f"The checkpoint of step {step}")
    target = checkpoint_folder(run_folder, step)
    with atomic_folder(target, overwrite=True) as folder:
        save_tensors(folder / TENSORS_FILE, tensors)
        atomic_write_json(folder / META_FILE, {"step": step, "meta": dict(meta)})
    return target


def load_run_state(path: Path) -> RunState:
    """Load a checkpoint folder, every byte of it checked against its manifest.

    Raises:
        CheckpointError: a file is missing, truncated or changed, or the folder is no checkpoint.
    """
    check_manifest(path)
    content = read_json_object(path / META_FILE)
    step, meta = content.get("step"), content.get("meta")
    if type(step) is not int or not isinstance(meta, dict):
        raise CheckpointError(
            explain(
                "Not a run checkpoint", expected="a step and its meta", got=sorted(content), where=str(path)
            )
        )
    return RunState(step=step, tensors=load_tensors(path / TENSORS_FILE), meta=meta)


def newest_complete(run_folder: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the newest checkpoint that is complete, and each newer one that is not with the reason."""
    skipped = []
    for folder in _step_folders(run_folder):
        try:
            check_manifest(folder)
        except CheckpointError as error:
            skipped.append((folder, str(error)))
        else:
            return folder, skipped
    return None, skipped


def prune(run_folder: Path, keep: int, *, spared: int | None = None, newest: int | None = None) -> list[Path]:
    """Remove all but the newest ``keep`` complete checkpoints and return what was removed.

    Call it after a save. Damaged folders stay for the user to see and never count as kept, so a complete one is
    never given up for them. What killed processes left goes too: one process alone writes to a run folder.

    Only sizes are looked at here, so a checkpoint whose content changed would count: name the run's own newest one.

    Args:
        run_folder: the output folder.
        keep: how many, at least one.
        spared: step of a checkpoint that stays besides, however old it is.
        newest: step of the one that was saved or resumed from last. Later ones were skipped as damaged: they stay, and
            do not count.
    """
    if keep < 1:
        raise ValueError(f"Cannot prune checkpoints: expected to keep 1 or more, got {keep}.")
    complete = []
    for folder in _step_folders(run_folder):
        if newest is not None and folder.name > checkpoint_folder(run_folder, newest).name:
            continue
        try:
            check_manifest(folder, hashes=False)
        except CheckpointError:
            continue
        complete.append(folder)
    if complete:
        sweep_leftovers(run_folder / CHECKPOINTS_FOLDER)
    kept = None if spared is None else checkpoint_folder(run_folder, spared)
    removed = [folder for folder in complete[keep:] if folder != kept]
    for folder in removed:
        remove_folder(folder)
    return removed


def _step_folders(run_folder: Path) -> list[Path]:
    """Return the folders of steps, newest first, one that a killed save had moved aside included."""
    parent = run_folder / CHECKPOINTS_FOLDER
    if not parent.is_dir():
        return []
    restore_interrupted(parent)
    steps = {int(match[1]): path for path in parent.iterdir() if (match := STEP_FOLDER.fullmatch(path.name))}
    return [steps[step] for step in sorted(steps, reverse=True)]
