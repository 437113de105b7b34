"""Saving the adapter, and the proof that stock PEFT reads it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from poros.adapters import for_wrapper
from poros.checkpoint import AdapterReport, save_adapter, verify_adapter
from poros.checkpoint.atomic import explaining_writes
from poros.engine.engine import Engine
from poros.errors import CheckpointError, explain
from poros.run.opening import OpenModel
from poros.wrappers import find_blocks, stock_model

__all__ = ["ADAPTER_FOLDER", "dry_save", "save_final_adapter"]

ADAPTER_FOLDER = "adapter"


def dry_save(output: Path, model: OpenModel, engine: Engine) -> None:
    """Save the untrained adapter into the output folder, read it back with stock PEFT and remove it.

    What would fail at the end of the run fails before its first step: a full disk, a name that PEFT does not know.

    Raises:
        OutputError, CheckpointError: see `save_adapter` and `verify_adapter`.
    """
    with (
        explaining_writes(output / ADAPTER_FOLDER),
        # Named like what a killed process leaves, so that it is swept like that.
        tempfile.TemporaryDirectory(dir=output, prefix=".dry-save.tmp-") as folder,
    ):
        _save(Path(folder) / ADAPTER_FOLDER, model, engine, require_nonzero=False)


def save_final_adapter(output: Path | str, model: OpenModel, engine: Engine) -> tuple[Path, AdapterReport]:
    """Save the trained adapter in PEFT's format and verify it; return its folder and what stock PEFT found.

    Keys match the class that a user's own `AutoModelForCausalLM` gives for the model.

    Raises:
        NonFiniteError: a tensor holds NaN or infinity.
        CheckpointError: keys are missing or unexpected, tensors have the wrong number or size, or every ``lora_B`` is
            zero.
    """
    folder = Path(output) / ADAPTER_FOLDER
    return folder, _save(folder, model, engine, require_nonzero=True)


def _save(folder: Path, model: OpenModel, engine: Engine, *, require_nonzero: bool) -> AdapterReport:
    meta = model.meta
    base = stock_model(model.config)
    blocks = find_blocks(base, meta.blocks[0])
    own, theirs = f"base_model.model.{meta.parts.blocks}.", f"base_model.model.{blocks}."
    tensors = {
        theirs + name.removeprefix(own): tensor for name, tensor in engine.model.adapter_tensors().items()
    }
    config = meta.lora_config if meta.wrapper is None else for_wrapper(meta.lora_config, blocks)
    made_for = {"base_class": type(base).__name__, "blocks": blocks}
    save_adapter(folder, tensors, config, model.name, made_for=made_for, overwrite=True)
    report = verify_adapter(folder, lambda: base, require_nonzero=require_nonzero)
    payload = sum(tensor.nbytes for tensor in tensors.values())
    if report.num_tensors != len(tensors) or report.num_bytes < payload:
        raise CheckpointError(
            explain(
                "The saved adapter is incomplete",
                expected=f"{len(tensors)} tensors of {payload} bytes",
                got=f"{report.num_tensors} tensors in a file of {report.num_bytes} bytes",
                where=str(folder),
            )
        )
    return report
