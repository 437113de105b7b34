"""Plans and predictions in words, from their records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poros.planning.advice import Advice
from poros.planning.planner import PlannedRun
from poros.units import format_gb

__all__ = [
    "advice_record",
    "bought_sentence",
    "budget_sentence",
    "plan_sentence",
    "predicted_sentence",
    "show_advice",
]

# Below half a per cent nothing is said to be gained.
LEAST_GAIN = 0.005
BINDINGS = {
    "compute": "bound by compute",
    "link": "bound by the link",
    "disk": "bound by the disk",
    "device memory": "bound by the device memory budget",
    "host memory": "bound by the host memory budget",
}


def plan_sentence(plan: Mapping[str, Any], num_blocks: int) -> str:
    """Return the placement of a run in one line."""
    if plan["residency"] == "resident":
        parts = ["every block and the head resident"]
    else:
        streams = plan["resident_blocks"] < num_blocks or plan["head"] == "host"
        parts = [
            f"{plan['num_slots']} slots" if streams else "no slots",
            f"{min(plan['resident_blocks'], num_blocks)} of {num_blocks} blocks resident",
            "head on the device" if plan["head"] == "device" else "head streamed",
        ]
        if plan.get("disk_blocks"):  # runs from before there was a disk tier do not say
            parts.insert(2, f"{min(plan['disk_blocks'], num_blocks)} from the disk")
    if plan["kept_blocks"]:
        parts.append(f"{min(plan['kept_blocks'], num_blocks)} of them not recomputed")
    where = "on the device" if plan["activations"] == "device" else "in host memory"
    parts += [f"activations {where}", plan["order"]]
    parts.append("one dequantization per visit" if plan["workspace"] else "dequantization at every use")
    if not plan["graphs"]:
        parts.append("no graphs")
    if not plan["pin_host_memory"]:
        parts.append("host memory not page-locked")
    return ", ".join(parts)


def predicted_sentence(device_bytes: int, host_bytes: int, step: Mapping[str, Any], binding: str) -> str:
    """Return what a plan is predicted to need and to take, in one line."""
    rate = step["tokens"] / step["seconds"]
    return (
        f"{format_gb(device_bytes)} device memory, {format_gb(host_bytes)} host memory, "
        f"{step['seconds']:.3g} s a step ({rate:.0f} tokens/s), {BINDINGS[binding]}"
    )


def budget_sentence(budget: Mapping[str, Any]) -> str:
    """Return what the plan was made under, in one line."""
    parts = []
    for name in ("device", "host"):
        count, limit = budget[f"{name}_bytes"], budget[f"{name}_limit"]
        parts.append(f"{name} memory: " + (limit if count is None else f"{format_gb(count)} ({limit})"))
    return "; ".join(parts) + ("; the least device memory at full speed is taken" if budget["frugal"] else "")


def advice_record(planned: PlannedRun, advice: Advice) -> dict[str, Any]:
    """Return advice as plain data."""
    richer, best = advice.one_more_gb, advice.best_shape
    return {
        "one_more_gb": {
            "device_bytes": richer.prediction.device_bytes,
            "step_seconds": richer.time.seconds,
            "saved_seconds": planned.time.seconds - richer.time.seconds,
        },
        "recommended": {
            "micro_batch_size": best.shape.micro_batch_size,
            "micro_batches": best.shape.num_micro_batches,
            "tokens_per_second": best.time.tokens_per_second,
            "device_bytes": best.prediction.device_bytes,
        },
    }


def bought_sentence(seconds: float, richer_seconds: float) -> str:
    """Return what one more GB of device memory changes about a step."""
    gain = 1 - richer_seconds / seconds
    if gain < LEAST_GAIN:
        return "nothing: the step does not wait for memory"
    return f"{richer_seconds:.3g} s a step instead of {seconds:.3g} s ({gain:.0%} less)"


def show_advice(record: Mapping[str, Any], seconds: float, shape: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return (label, sentence) of `advice_record`, beside the planned step time and the shape that was asked about."""
    best = record["recommended"]
    bought = bought_sentence(seconds, record["one_more_gb"]["step_seconds"])
    size, count = best["micro_batch_size"], best["micro_batches"]
    if size == shape["micro_batch_size"]:
        advised = f"{size} (as asked)"
    else:
        advised = (
            f"{size}, micro-batches {count}: {best['tokens_per_second']:.0f} tokens/s in "
            f"{format_gb(best['device_bytes'])}. Other micro-batches round differently: choose before a run"
        )
    return [("one more GB buys", bought), ("best micro-batch size", advised)]
