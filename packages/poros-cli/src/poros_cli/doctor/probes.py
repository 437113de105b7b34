"""Measurements on the device: a real NF4 round trip, the host-to-device link, how much can be page-locked."""

from __future__ import annotations

import statistics
import warnings
from typing import Any

import torch

__all__ = ["device_facts", "link_gigabytes_per_second", "nf4_round_trip", "pinnable"]

NF4_SIZE = 64
# The widest gap between neighbouring NF4 codes is 0.304 of a block's absmax (-1.0 to -0.696), so rounding costs at
# most half of it; quantizing the absmax itself adds a few percent. Above this the kernel computed something else.
NF4_MAX_RELATIVE_ERROR = 0.2
LINK_BYTES = 2**28
LINK_REPEATS = 5
PIN_STEP_BYTES = 2**30
# Page-locked memory cannot be reclaimed: the probe leaves this much to everybody else.
PIN_RESERVE_BYTES = 2 * 2**30


def device_facts() -> list[dict[str, Any]]:
    """Return every visible CUDA device; an empty list without one."""
    if not torch.cuda.is_available():
        return []
    facts = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        facts.append(
            {
                "index": index,
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "memory_total_bytes": total,
                "memory_free_bytes": free,
            }
        )
    return facts


def nf4_round_trip(device: torch.device) -> dict[str, Any]:
    """Quantize a 64 x 64 weight with bitsandbytes, dequantize it and multiply with it, on ``device``.

    Returns:
        ``ok``, the error relative to the largest weight, and ``error`` in words (None when ok). Never raises: a
        missing kernel can show as any exception.
    """
    result: dict[str, Any] = {"device": str(device), "ok": False, "relative_error": None, "error": None}
    try:
        import bitsandbytes.functional as bnb

        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(NF4_SIZE, NF4_SIZE, generator=generator).to(device, torch.bfloat16)
        codes, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        back = bnb.dequantize_4bit(codes, state)
        largest = weight.abs().max().float()
        result["relative_error"] = float((back - weight).abs().max().float() / largest)
        identity = torch.eye(NF4_SIZE, device=device, dtype=torch.bfloat16)
        product_agrees = torch.equal(torch.nn.functional.linear(identity, back), back.t())
    except Exception as error:  # whatever a broken binary raises is the finding
        result["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return result
    if not result["relative_error"] <= NF4_MAX_RELATIVE_ERROR:
        result["error"] = (
            f"relative error {result['relative_error']:.3f}, expected at most {NF4_MAX_RELATIVE_ERROR}"
        )
    elif not product_agrees:
        result["error"] = "the product with the identity differs from the dequantized weight"
    result["ok"] = result["error"] is None
    return result


def link_gigabytes_per_second(device: torch.device) -> dict[str, Any]:
    """Measure host-to-device copies of 256 MiB: the median of five, from page-locked and from pageable memory."""
    target = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    pageable = torch.ones(LINK_BYTES, dtype=torch.uint8)
    return {
        "pinned_gigabytes_per_second": _pinned_speed(target),
        "pageable_gigabytes_per_second": _copy_speed(pageable, target),
    }


def pinnable(usable_bytes: int, limit_bytes: int) -> dict[str, Any]:
    """Page-lock host memory in steps of 1 GiB until the system refuses or a limit is reached, and free it again.

    Args:
        usable_bytes: host memory that is free for this process.
        limit_bytes: page-lock at most this much.

    Returns:
        ``pinned_bytes``, and ``stopped_by``: ``refused`` (``message`` says how), ``memory`` or ``limit``.
    """
    from poros.blocks.host_memory import HostArena

    room = max(usable_bytes - PIN_RESERVE_BYTES, 0)
    steps = min(room, limit_bytes) // PIN_STEP_BYTES
    stopped_by = "memory" if room < limit_bytes else "limit"
    if steps == 0:
        return {"pinned_bytes": 0, "stopped_by": stopped_by, "message": None}
    with warnings.catch_warnings(record=True) as refusals:
        warnings.simplefilter("always")
        arena = HostArena([PIN_STEP_BYTES] * steps, pin=True)
    pinned_bytes = arena.pinned_bytes
    arena.close()
    if refusals:
        return {"pinned_bytes": pinned_bytes, "stopped_by": "refused", "message": str(refusals[0].message)}
    return {"pinned_bytes": pinned_bytes, "stopped_by": stopped_by, "message": None}


def _pinned_speed(target: torch.Tensor) -> float | None:
    from poros.blocks.host_memory import HostArena

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the pinning probe reports a refusal
        arena = HostArena([LINK_BYTES], pin=True)
    if not arena.pinned_bytes:
        return None
    source = arena.region(0)
    source.fill_(1)
    speed = _copy_speed(source, target)
    arena.close()
    return speed


def _copy_speed(source: torch.Tensor, target: torch.Tensor) -> float:
    seconds = []
    with torch.cuda.device(target.device):
        for _ in range(LINK_REPEATS + 1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
    return source.numel() / statistics.median(seconds[1:]) / 1e9  # the first copy warms up
