"""What `poros check` says about a model, as plain data with units in the names, and how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from poros.adapters import lora_layers
from poros.checkpoint import load_config, resolve_model
from poros.model import MetaModel
from poros.plugins import Registry
from poros.run import describe_model, open_model
from poros.run.memory import available_host_bytes, format_bytes
from poros.planning.prediction import StepShape, predict
from poros.settings import LoraSettings, Numerics, Plan

__all__ = ["check_model", "show_check"]

# Any of these means that weights are meant to be there: then they are checked, and refused where they cannot be read.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf")


def check_model(
    model: str, *, quantization: str, lora: LoraSettings, plan: Plan, shape: StepShape, registry: Registry
) -> dict[str, Any]:
    """Pass a model through every check that needs no weights, and predict its memory.

    A local folder that holds weights is checked with its shard headers; otherwise ``config.json`` is enough, and of a
    hub model nothing else is fetched.

    Args:
        model: local folder or hub id.
        quantization: registered name of the weight format.
        lora: adapters.
        plan: placement; both residencies are predicted.
        shape: the largest optimizer step.
        registry: loaded plugins.

    Raises:
        UserError: the model is refused.
    """
    numerics = Numerics()
    folder = Path(model).expanduser()
    weights = [path for pattern in WEIGHTS for path in folder.glob(pattern)] if folder.is_dir() else []
    notes: list[str] = []
    if weights:
        opened = open_model(model, quantization=quantization, lora=lora, numerics=numerics, registry=registry)
        verdict, meta = opened.verdict, opened.meta
        notes.extend(opened.notes)
    else:
        config = load_config(resolve_model(model, config_only=True))
        verdict, _, meta = describe_model(
            config, quantization=quantization, lora=lora, numerics=numerics, registry=registry
        )
        notes.append("Only `config.json` was looked at: the weights are checked when the model is trained.")
    predictions = {}
    for residency in ("streamed", "resident"):
        placed = Plan(
            residency=residency, num_slots=plan.num_slots, order=plan.order, workspace=plan.workspace
        )
        prediction = predict(meta, numerics=numerics, plan=placed, shape=shape)
        predictions[residency] = {
            "device_bytes": prediction.device_bytes,
            "host_bytes": prediction.host_bytes,
            "device_terms_bytes": dict(prediction.device),
            "host_terms_bytes": dict(prediction.host),
        }
    available, limit = available_host_bytes()
    return {
        "model": model,
        "model_type": meta.config.model_type,
        "architecture": meta.architecture.name,
        "status": verdict.status,
        "registered_by": verdict.distribution,
        "quantization": quantization,
        "weights_checked": bool(weights),
        "num_blocks": len(meta.blocks),
        "block_kinds": [
            {"blocks": list(kind.blocks), "block_bytes": kind.layout.num_bytes} for kind in meta.kinds
        ],
        "targets": _matched(meta),
        "adapter_parameters": sum(p.numel() for p in meta.blocks.parameters() if p.requires_grad),
        "micro_batches": shape.num_micro_batches,
        "micro_batch_size": shape.micro_batch_size,
        "max_length": shape.tokens,
        "predicted": predictions,
        "host_available_bytes": available,
        "host_limited_by": limit,
        "notes": notes,
    }


def show_check(facts: dict[str, Any], console: Console) -> None:
    """Print the facts for people."""
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(facts):
        table.add_row(Text(name), Text(value))
    console.print(table)
    console.print()
    shape = f"{facts['micro_batches']} x {facts['micro_batch_size']} x {facts['max_length']} tokens a step"
    memory = Table(title=f"Predicted peak, {shape}", title_justify="left", box=None, padding=(0, 2))
    memory.add_column("")
    for residency in facts["predicted"]:
        memory.add_column(residency, justify="right", no_wrap=True)
    for where in ("device", "host"):
        terms = {name: None for p in facts["predicted"].values() for name in p[f"{where}_terms_bytes"]}
        for name in terms:
            found = [p[f"{where}_terms_bytes"].get(name) for p in facts["predicted"].values()]
            memory.add_row(Text(f"{where}: {name}"), *("" if n is None else format_bytes(n) for n in found))
        totals = [format_bytes(p[f"{where}_bytes"]) for p in facts["predicted"].values()]
        memory.add_row(Text(f"{where}, together", style="bold"), *totals)
    console.print(memory)
    console.print()
    for note in facts["notes"]:
        console.print(Text(f"Note: {note}"))


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    kinds = [
        f"{len(kind['blocks'])} x {format_bytes(kind['block_bytes'])} (blocks {ranges(kind['blocks'])})"
        for kind in facts["block_kinds"]
    ]
    matched = [f"{name}: {count} of {facts['num_blocks']} blocks" for name, count in facts["targets"].items()]
    return [
        ("model", facts["model"]),
        ("architecture", f"{facts['architecture']}, {facts['status']} (by {facts['registered_by']})"),
        ("weight format", facts["quantization"]),
        ("blocks by kind", "\n".join(kinds)),
        ("adapter targets", "\n".join(matched)),
        ("adapter parameters", f"{facts['adapter_parameters']:,}"),
        ("host memory here", f"{format_bytes(facts['host_available_bytes'])} ({facts['host_limited_by']})"),
    ]


def _matched(meta: MetaModel) -> dict[str, int]:
    """Return, per target leaf name, in how many blocks it is adapted."""
    counts = dict.fromkeys(meta.targets, 0)
    for block in meta.blocks:
        for leaf in {path.rpartition(".")[2] for path, _ in lora_layers(block)}:
            counts[leaf] += 1
    return counts


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ``0-3, 5, 7-8``."""
    parts: list[str] = []
    start = previous = numbers[0]
    for number in [*numbers[1:], None]:
        if number is not None and number == previous + 1:
            previous = number
            continue
        parts.append(f"{start}" if start == previous else f"{start}-{previous}")
        if number is not None:
            start = previous = number
    return ", ".join(parts)
