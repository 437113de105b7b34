"""Merging an adapter into 16-bit weights, one tensor at a time, and measuring what the merged model answers."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from poros.checkpoint import atomic_folder, check_free_space
from poros.checkpoint.shards import INDEX_FILE
from poros.checkpoint.tensor_file import check_finite, save_tensors
from poros.errors import ConfigError, OutputError, explain
from poros.export.adapter import Adapter
from poros.export.fitting import AdaptedModel, open_with_adapter
from poros.export.model_files import copy_companions, write_config
from poros.export.probe import LogitDifference, compare_logits, probe_logits
from poros.export.weights import MERGED_DTYPE, MergedWeights, RoundedSource
from poros.plugins import Registry
from poros.run.opening import open_model

__all__ = ["BASES", "DEFAULT_FORMAT", "SHARD_BYTES", "MergeReport", "merge"]

BASES = ("original", "dequantized")
SHARD_BYTES = 5 * 10**9
# What `poros train` quantizes to unless it is told otherwise.
DEFAULT_FORMAT = "nf4"
# The checkpoint's own 16-bit values, as a weight format.
PLAIN_FORMAT = "bf16_bitwise"
CPU = torch.device("cpu")

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeReport:
    """What was written, and how it answers.

    Attributes:
        folder: the merged model.
        model_class: the class of Transformers that loads it.
        num_bytes: of the weights.
        files: of the weights.
        merged_layers: linear layers that the adapter changed.
        companions: files copied from the base.
        differences: on the probe, to the base that was merged onto with the adapter, and where a run tells what it was
            trained on, to that with the adapter.
        notes: sentences that the user should see.
    """

    folder: Path
    model_class: str
    num_bytes: int
    files: tuple[str, ...]
    merged_layers: int
    companions: tuple[str, ...]
    differences: tuple[LogitDifference, ...]
    notes: tuple[str, ...]


def merge(
    adapter: Adapter,
    model: str | Path,
    output: Path | str,
    *,
    registry: Registry,
    base: str = "original",
    quantization: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    device: torch.device = CPU,
    probe: Callable[[AdaptedModel], Sequence[int]],
    progress: Progress | None = None,
) -> MergeReport:
    """Write base plus adapter as bfloat16 safetensors that stock Transformers loads, and measure the result.

    Of a multimodal wrapper the text model is written, as a model of its own.

    Args:
        adapter: from `find_adapter`.
        model: folder or hub id of the base, unquantized.
        output: the new folder; it appears when it is complete.
        base: ``original``: the checkpoint's own values; ``dequantized``: what training multiplied with, each linear
            weight quantized and dequantized.
        quantization: the format of ``dequantized``; None is the run's, or `DEFAULT_FORMAT` where no run tells.
        shard_bytes: largest weights file; a larger tensor gets a file of its own.
        device: where products, quantization and the probe are computed.
        probe: returns the tokens of the probe for the opened base.
        progress: called with (tensors done, tensors).

    Raises:
        OutputError: ``output`` is in use, or the disk is full; nothing half-written is left.
        CheckpointError, ConfigError, FormatError, ArchitectureError: see `open_with_adapter`; a quantized base is
            refused.
        NonFiniteError: a merged weight is NaN or infinite.

    Memory:
        One shard and one weight in float32 while writing; one block, two device slots and the vocabulary matrices in
        the probe, which reads each model once.
    """
    if base not in BASES:
        raise ConfigError(
            explain(
                "Bad setting `base`",
                expected=" or ".join(BASES),
                got=repr(base),
                next_step="A merge into 4-bit weights is not offered: that rounds most of the adapter away",
            )
        )
    output = Path(output).expanduser()
    _check_output(output)
    trained = quantization or adapter.quantization(registry)
    dequantized = base == "dequantized"
    numerics = adapter.numerics()
    with _unannounced_format():
        adapted = open_with_adapter(
            model, adapter, quantization=trained or DEFAULT_FORMAT, numerics=numerics, registry=registry
        )
    ids = probe(adapted)
    weights = MergedWeights(adapted, dequantized=dequantized, device=device)
    num_bytes, files, companions = _write(adapted, weights, output, shard_bytes, progress)
    meta = adapted.model.meta
    notes = [*adapted.notes, *_notes(adapted, weights, adapter, device, dequantized=dequantized)]
    with _unannounced_format():
        merged = open_model(output, quantization=PLAIN_FORMAT, numerics=numerics, registry=registry)
        plain = open_with_adapter(
            model, adapter, quantization=PLAIN_FORMAT, numerics=numerics, registry=registry
        )
    logits = probe_logits(merged, ids, device)
    differences = []
    if not dequantized:
        original = replace(plain.model, source=RoundedSource(plain.model.source))
        found = probe_logits(original, ids, device, plain.fill)
        differences.append(compare_logits(logits, found, "the original base + adapter"))
    if dequantized or trained not in (None, PLAIN_FORMAT):
        found = probe_logits(adapted.model, ids, device, adapted.fill)
        name = adapted.model.weight_format.name
        differences.append(compare_logits(logits, found, f"the {name} base that was trained + adapter"))
    return MergeReport(
        folder=output,
        model_class=type(meta.module).__name__,
        num_bytes=num_bytes,
        files=files,
        merged_layers=len(adapted.pairs),
        companions=companions,
        differences=tuple(differences),
        notes=tuple(notes),
    )


@contextlib.contextmanager
def _unannounced_format() -> Iterator[None]:
    """Keep quiet about an experimental weight format: nothing is trained with it here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "EXPERIMENTAL: the weight format")
        yield


def _check_output(output: Path) -> None:
    """Refuse what cannot become the new folder before anything is read."""
    if not os.path.lexists(output) or _is_empty(output):
        return
    raise OutputError(
        explain(
            "The output folder is in use",
            expected="a new or empty folder",
            got="a folder with content" if output.is_dir() else "a file",
            where=str(output),
            next_step="Name another folder: a merge never replaces one",
        )
    )


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def _write(
    adapted: AdaptedModel,
    weights: MergedWeights,
    output: Path,
    shard_bytes: int,
    progress: Progress | None,
) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    """Write the folder; return the weights' bytes, their files and the copied ones."""
    shapes = {
        name: torch.empty(weights.shape(name), dtype=MERGED_DTYPE, device="meta") for name in weights.names
    }
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=shard_bytes)
    num_bytes = sum(tensor.nbytes for tensor in shapes.values())
    check_free_space(output.parent, num_bytes, "the merged weights")
    done = 0
    with atomic_folder(output, overwrite=_is_empty(output)) as folder:
        write_config(adapted.model, folder)
        companions = copy_companions(adapted.model.folder, folder)
        for file_name, names in split.filename_to_tensors.items():
            shard = {}
            for name in names:
                shard[name] = weights.load(name)
                done += 1
                if progress is not None:
                    progress(done, len(shapes))
            check_finite(shard, "The merged model")
            save_tensors(folder / file_name, shard, {"format": "pt"})
        if split.is_sharded:
            index = {"metadata": {"total_size": num_bytes}, "weight_map": split.tensor_to_filename}
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return num_bytes, tuple(split.filename_to_tensors), companions


def _notes(
    adapted: AdaptedModel,
    weights: MergedWeights,
    adapter: Adapter,
    device: torch.device,
    *,
    dequantized: bool,
) -> list[str]:
    model, notes = adapted.model, []
    if model.meta.wrapper is not None:
        notes.append(
            f"The base is a multimodal wrapper (`{model.meta.wrapper.model_type}`): the merged model is its text model "
            "alone, without vision or audio."
        )
    if weights.casts:
        counted = ", ".join(f"{count} in {dtype}" for dtype, count in sorted(weights.casts.items()))
        notes.append(f"The base holds other dtypes than bfloat16, rounded once: {counted}.")
    if dequantized:
        own = model.weight_format.fingerprint()
        stated, where = adapter.format_fingerprint, adapter.trained_on
        if stated is not None and stated != own:
            notes.append(f"The run quantized with `{stated}`, this merge with `{own}`: weights may differ.")
        if where is not None and (where == "CPU") != (device.type == "cpu"):
            notes.append(
                f"The run quantized on {where}, this merge on {device}: weights may differ in single codes."
            )
    return notes
