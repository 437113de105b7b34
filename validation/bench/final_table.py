"""The table that a bench run prints last: everything that was measured, and whether targets were met."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cases import Row

from poros.bench import with_floor

COLUMNS = (
    "row",
    "step s",
    "target",
    "tokens/s",
    "peak GB",
    "target",
    "predicted",
    "moved GB",
    "link GB/s",
    "stall s",
    "bound",
    "x resident",
    "host GB",
    "build s",
)


def final_table(results: Sequence[tuple[Row, dict[str, Any]]]) -> str:
    """Return one line per row; a streamed row is set against the resident one of the same case and numerics."""
    residents = {
        (row.case.name, row.blocks): result
        for row, result in results
        if row.system == "poros-resident" and not row.label and "error" not in result
    }
    lines = [COLUMNS]
    for row, result in results:
        if "error" in result:
            lines.append((row.name, f"{result['error']['kind']}: {result['error']['message']}"[:100]))
        elif row.system == "check":
            lines.append((row.name, result["verdict"], result["detail"][:100]))
        else:
            lines.append(_cells(row, result, residents.get((row.case.name, row.blocks))))
    widths = [max(len(line[i]) for line in lines if len(line) == len(COLUMNS)) for i in range(len(COLUMNS))]
    widths[0] = max(len(line[0]) for line in lines)
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=False)) for line in lines)


def _cells(row: Row, result: dict[str, Any], resident: dict[str, Any] | None) -> tuple[str, ...]:
    streamed = row.system == "poros-streamed"
    if streamed and resident is not None:
        result = with_floor(result, resident)
    return (
        row.name,
        f"{result['step_seconds']:.4f}",
        _met(result["step_seconds"], row.target_seconds),
        f"{result['tokens_per_second']:.0f}",
        _number(result.get("peak_device_bytes"), 1e9),
        _met(result.get("peak_device_bytes"), row.target_gb and row.target_gb * 1e9, 1e9),
        _predicted(result),
        _number(result.get("h2d_bytes_per_step"), 1e9),
        _number(result.get("link_bytes_per_second"), 1e9, 1),
        _number(result.get("exposed_copy_seconds"), 1, 4),
        _number(result.get("bound_share"), 1),
        _number(result.get("slowdown"), 1, 3),
        _number(result["peak_host_bytes"], 1e9),
        _number(result.get("build_seconds"), 1, 1),
    )


def _predicted(result: dict[str, Any]) -> str:
    """Return predicted over measured peak, which should lie between 1.00 and 1.15."""
    predicted, measured = result.get("predicted"), result.get("peak_device_bytes")
    return f"x{predicted['device_bytes'] / measured:.2f}" if predicted and measured else "-"


def _number(value: float | None, unit: float, digits: int = 2) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def _met(value: float | None, target: float | None, unit: float = 1) -> str:
    if value is None or target is None:
        return "-"
    return f"{'met' if value <= target else 'MISSED'} {target / unit:g}"
