"""What `poros bench` measures, as plain data with units in the names, and how it is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from poros.bench import BenchSpec, run_spec, with_floor
from poros.errors import UserError
from poros.units import format_bytes

__all__ = ["measure_both", "show_bench"]

Results = Mapping[str, Mapping[str, Any]]
SECONDS = "{:.4f} s"


def measure_both(spec: BenchSpec, *, resident: bool) -> dict[str, Any]:
    """Measure a spec streamed and, unless left out, resident, each in a fresh process.

    Args:
        spec: of the streamed run; its memory limit holds for that run alone.

    Raises:
        UserError: the streamed run refused what it was asked for.
    """
    results = {"streamed": run_spec(spec)}
    error = results["streamed"].get("error", {})
    if error.get("kind") == "refused":
        raise UserError(error["message"].partition(": ")[2])
    if resident:
        results["resident"] = run_spec(replace(spec, plan={"residency": "resident"}, memory_limit_bytes=None))
        if not any("error" in result for result in results.values()):
            results["streamed"] = with_floor(results["streamed"], results["resident"])
    return {
        "model": spec.model,
        "micro_batches": spec.micro_batches,
        "micro_batch_size": spec.micro_batch_size,
        "seq_len": spec.tokens,
        "results": results,
    }


def show_bench(facts: Mapping[str, Any], console: Console) -> None:
    """Print the results side by side, then what went wrong."""
    results: Results = facts["results"]
    measured = {name: result for name, result in results.items() if "error" not in result}
    shape = f"{facts['micro_batches']} x {facts['micro_batch_size']} x {facts['seq_len']} tokens a step"
    if measured:
        table = Table(title=f"{facts['model']}, {shape}", title_justify="left", box=None, padding=(0, 2))
        table.add_column("")
        for name in measured:
            table.add_column(name, justify="right", no_wrap=True)
        for label, show in ROWS:
            cells = [show(result) for result in measured.values()]
            if any(cells):
                table.add_row(Text(label), *cells)
        console.print(table)
    for name, result in results.items():
        if "error" in result:
            console.print(Text(f"{name}: {result['error']['kind']}: {result['error']['message']}"))
        for note in result.get("notes", ()):
            console.print(Text(f"{name}: {note}"))


def _cell(name: str, form: str | Callable[[float], str]) -> Callable[[Mapping[str, Any]], str]:
    def show(result: Mapping[str, Any]) -> str:
        value = result.get(name)
        if value is None:
            return ""
        return form.format(value) if isinstance(form, str) else form(value)

    return show


def _rate(value: float) -> str:
    return f"{value / 1e9:.1f} GB/s"


ROWS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("step, median", _cell("step_seconds", SECONDS)),
    ("steps", _cell("all_step_seconds", lambda v: " ".join(f"{s:.3f}" for s in v))),  # type: ignore[attr-defined]
    ("tokens a second", _cell("tokens_per_second", "{:.0f}")),
    ("times the resident step", _cell("slowdown", "{:.3f}")),
    ("share of the bound", _cell("bound_share", "{:.1%}")),
    ("floor of the link", _cell("link_floor_seconds", SECONDS)),
    ("moved to the device a step", _cell("h2d_bytes_per_step", format_bytes)),
    ("moved to the host a step", _cell("d2h_bytes_per_step", format_bytes)),
    ("waited for copies a step", _cell("exposed_copy_seconds", SECONDS)),
    ("link, measured", _cell("link_bytes_per_second", _rate)),
    ("peak on the device, whole process", _cell("peak_device_bytes", format_bytes)),
    ("peak on the device, predicted", _cell("predicted", lambda v: format_bytes(v["device_bytes"]))),  # type: ignore[index]
    ("of that, reserved by torch", _cell("peak_reserved_bytes", format_bytes)),
    ("of that, CUDA context", _cell("context_bytes", format_bytes)),
    ("peak on the host, above the imports", _cell("peak_host_bytes", format_bytes)),
    ("store on the host", _cell("store_allocated_bytes", format_bytes)),
    ("building the model", _cell("build_seconds", "{:.1f} s")),
)
