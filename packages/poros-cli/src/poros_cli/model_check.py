"""What `poros check` says about a model, as plain data with units in the names, and how it is shown."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from poros.adapters import matched_blocks
from poros.checkpoint import load_config, resolve_model
from poros.effective_config import effective_config
from poros.model import MetaModel
from poros.planning.advice import advise
from poros.planning.planner import PlannedRun, make_plan
from poros.planning.prediction import Prediction, predict
from poros.planning.rates import Rates, assumed_rates
from poros.planning.request import Budget, PlanRequest
from poros.planning.shape import StepShape
from poros.plugins import Registry
from poros.run import describe_model, open_model
from poros.run.fingerprint import flatten
from poros.run.memory import available_host_bytes, resolve_budget
from poros.run.opening import opening_notes
from poros.run.placement import disk_note, machine_rates
from poros.settings import LoraSettings, Numerics, Plan
from poros.units import format_bytes, format_gb, ranges
from poros_cli.gate_text import effective_record, effective_rows, verdict_record, verdict_rows
from poros_cli.plan_text import advice_record, budget_sentence, plan_sentence, show_advice

__all__ = ["check_model", "show_check"]

# Any of these means that weights are meant to be there: then they are checked, and refused where they cannot be read.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf")


def check_model(
    model: str,
    *,
    quantization: str,
    lora: LoraSettings,
    request: PlanRequest,
    shape: StepShape,
    vram_bytes: int | None,
    ram_bytes: int | None,
    registry: Registry,
) -> dict[str, Any]:
    """Pass a model through every check that needs no weights, and plan its run.

    A local folder that holds weights is checked with its shard headers; otherwise ``config.json`` is enough, and of a
    hub model nothing else is fetched.

    Args:
        model: local folder or hub id.
        quantization: registered name of the weight format.
        lora: adapters.
        request: placement that is decided already.
        shape: the largest optimizer step.
        vram_bytes, ram_bytes: budgets, or None.
        registry: loaded plugins.

    Raises:
        UserError: the model is refused, or no plan fits into the budgets.
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
        config_folder = resolve_model(model, config_only=True)
        config = load_config(config_folder)
        verdict, _, meta = describe_model(
            config, quantization=quantization, lora=lora, numerics=numerics, registry=registry
        )
        notes += opening_notes(config_folder, config, meta)
        notes.append("Only `config.json` was looked at: the weights are checked when the model is trained.")
    budget, rates, budget_notes = _machine(meta, numerics, vram_bytes, ram_bytes)
    notes.extend(budget_notes)
    make = functools.partial(_plan, meta, numerics, rates, request)
    planned = make(shape, budget)
    if planned.plan.disk_blocks:
        notes.append(f"{disk_note(planned, len(meta.blocks))} Training needs `cache_dir` for it.")
    resident = predict(
        meta, numerics=numerics, plan=Plan(residency="resident", order=planned.plan.order), shape=shape
    )
    available, limit = available_host_bytes()
    if planned.prediction.host_bytes > available:
        notes.append(
            f"This machine has {format_gb(available)} of host memory left ({limit}), less than the run needs."
        )
    return {
        "model": model,
        "model_type": (meta.wrapper or meta.config).model_type,
        "architecture": meta.architecture.name,
        "status": verdict.status,
        "registered_by": verdict.distribution,
        **verdict_record(verdict, torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        **effective_record(effective_config(meta.config, meta.architecture, meta.parts)),
        "quantization": quantization,
        "kernels": dict(meta.architecture.kernels()),
        "weights_checked": bool(weights),
        "num_blocks": len(meta.blocks),
        "block_kinds": [
            {"blocks": list(kind.blocks), "block_bytes": kind.layout.num_bytes} for kind in meta.kinds
        ],
        "targets": {name: len(found) for name, found in matched_blocks(meta.blocks, meta.targets).items()},
        "adapter_parameters": sum(p.numel() for p in meta.blocks.parameters() if p.requires_grad),
        "micro_batches": shape.num_micro_batches,
        "micro_batch_size": shape.micro_batch_size,
        "max_length": shape.tokens,
        "plan": flatten(planned.plan),
        "budget": flatten(planned.budget),
        "predicted": {"planned": _memory(planned.prediction), "resident": _memory(resident)},
        "predicted_step": {
            **flatten(planned.time),
            "exposed_seconds": planned.time.exposed_seconds,
            "tokens_per_second": planned.time.tokens_per_second,
        },
        "binding": planned.binding,
        "rates": flatten(rates),
        **advice_record(planned, advise(planned, make)),
        "host_available_bytes": available,
        "host_limited_by": limit,
        "notes": notes,
    }


def _plan(
    meta: MetaModel,
    numerics: Numerics,
    rates: Rates,
    request: PlanRequest,
    shape: StepShape,
    budget: Budget,
) -> PlannedRun:
    # Whether there is a folder for stores is the config's to say.
    return make_plan(meta, numerics, shape, budget, rates, request=request, has_cache=True)


def _machine(
    meta: MetaModel, numerics: Numerics, vram_bytes: int | None, ram_bytes: int | None
) -> tuple[Budget, Rates, tuple[str, ...]]:
    """Return budgets and rates of this machine's GPU, or what is assumed where there is none."""
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        budget, notes = resolve_budget(device, device_bytes=vram_bytes, host_bytes=ram_bytes)
        return budget, machine_rates(device, numerics.compute_dtype, meta.kinds[0]), notes
    budget = Budget(
        device_bytes=vram_bytes,
        host_bytes=ram_bytes,
        device_limit="no limit" if vram_bytes is None else "the `vram` budget",
        host_limit="no limit" if ram_bytes is None else "the `ram` budget",
        frugal=vram_bytes is None,
    )
    return budget, assumed_rates(numerics.compute_dtype), ()


def _memory(prediction: Prediction) -> dict[str, Any]:
    return {
        "device_bytes": prediction.device_bytes,
        "host_bytes": prediction.host_bytes,
        "device_terms_bytes": dict(prediction.device),
        "host_terms_bytes": dict(prediction.host),
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
    _show_plan(facts, console)
    memory = Table(title="Predicted peak", title_justify="left", box=None, padding=(0, 2))
    memory.add_column("")
    for name in facts["predicted"]:
        memory.add_column(name, justify="right", no_wrap=True)
    for where in ("device", "host"):
        terms = {name: None for p in facts["predicted"].values() for name in p[f"{where}_terms_bytes"]}
        for name in terms:
            found = [p[f"{where}_terms_bytes"].get(name) for p in facts["predicted"].values()]
            memory.add_row(Text(f"{where}: {name}"), *("" if n is None else format_gb(n) for n in found))
        totals = [format_gb(p[f"{where}_bytes"]) for p in facts["predicted"].values()]
        memory.add_row(Text(f"{where}, together", style="bold"), *totals)
    console.print(memory)
    console.print()
    for note in facts["notes"]:
        console.print(Text(f"Note: {note}"))


def _show_plan(facts: dict[str, Any], console: Console) -> None:
    shape = f"{facts['micro_batches']} x {facts['micro_batch_size']} x {facts['max_length']} tokens a step"
    step = facts["predicted_step"]
    seconds = step["seconds"]
    rows = [
        ("budget", budget_sentence(facts["budget"])),
        ("plan", plan_sentence(facts["plan"], facts["num_blocks"])),
        (
            "predicted step",
            f"{seconds:.3g} s, {step['tokens_per_second']:.0f} tokens/s: compute {step['compute_seconds']:.3g} s, "
            f"link busy {step['link_seconds']:.3g} s ({format_gb(step['h2d_bytes'])}), not hidden "
            f"{step['exposed_seconds']:.3g} s",
        ),
        ("binding resource", facts["binding"]),
        *show_advice(facts, seconds, facts),
        ("rates", facts["rates"]["origin"]),
    ]
    title = f"Plan for {shape}" + ("" if facts["rates"]["measured"] else ", times at assumed rates")
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    console.print(table)
    console.print()


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    kinds = [
        f"{len(kind['blocks'])} x {format_bytes(kind['block_bytes'])} (blocks {ranges(kind['blocks'])})"
        for kind in facts["block_kinds"]
    ]
    matched = [f"{name}: {count} of {facts['num_blocks']} blocks" for name, count in facts["targets"].items()]
    return [
        ("model", facts["model"]),
        ("architecture", f"{facts['architecture']}, {facts['status']} (by {facts['registered_by']})"),
        *verdict_rows(facts),
        *effective_rows(facts),
        ("weight format", facts["quantization"]),
        *(("kernel", f"{name}: {kernel}") for name, kernel in facts["kernels"].items()),
        ("blocks by kind", "\n".join(kinds)),
        ("adapter targets", "\n".join(matched)),
        ("adapter parameters", f"{facts['adapter_parameters']:,}"),
        ("host memory here", f"{format_bytes(facts['host_available_bytes'])} ({facts['host_limited_by']})"),
    ]
