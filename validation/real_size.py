"""The residency gate at real sizes: seeded random weights at published config values, full depth, one receipt a case.

Run on a GPU machine, from the repository's root:

    python validation/real_size.py --output validation/receipts --controls early-refill -- qwen2.5-7b:nf4

A case is SHAPE:FORMAT[:BLOCKS]. Exit code 0 means that every comparison was equal and every control failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from poros.bench.link import link_bytes_per_second
from poros.determinism import configure
from poros.interfaces import ParityCase
from poros.parity import compare
from poros.parity.case_run import CaseRun, case_micro_batches, start_case
from poros.parity.faults import FAULTS, GRAPH_FAULTS, STATE_FAULTS
from poros.parity.receipts import write_receipt
from poros.parity.trajectory import Trajectory
from poros.plugins import Registry, load_registry
from poros.settings import ACCUMULATION_ORDERS, Numerics, Plan
from poros_arch_gemma import real_shapes as gemma
from poros_arch_gemma.gemma4_shapes import GEMMA4_SHAPES
from poros_arch_qwen import real_shapes as qwen
from poros_quant.aliasing import MAX_FAULTY_COSINE, reproduce_aliasing

NUM_STEPS = 3
TIMED_STEPS = 2
LARGE_STEP_MICRO_BATCHES = 8

CONTROLS = FAULTS | GRAPH_FAULTS | STATE_FAULTS

# What returns the config of a shape.
SHAPES: dict[str, Callable[[str, int | None], PreTrainedConfig]] = {
    **dict.fromkeys(qwen.REAL_SHAPES, qwen.real_config),
    **dict.fromkeys([*gemma.REAL_SHAPES, *GEMMA4_SHAPES], gemma.real_config),
}

# Untimed, the first plan is the only one: every knob is turned in it.
PLANS = {
    "streamed, 2 slots, block-major, head and activations on the host, some blocks resident": Plan(
        num_slots=2, resident_blocks=5, head="host", activations="host", workspace=True
    ),
    "streamed, 2 slots, block-major": Plan(num_slots=2),
    "streamed, 3 slots, block-major, workspace": Plan(num_slots=3, workspace=True),
    "streamed, 3 slots, micro-batch-major": Plan(num_slots=3, order=ACCUMULATION_ORDERS[1]),
}


def make_case(
    shape: str, weight_format: str, num_blocks: int | None, tokens: int, registry: Registry
) -> ParityCase:
    """Return a case of two micro-batches of unequal length, rank 16 on every linear layer."""
    make_config = partial(SHAPES[shape], shape, num_blocks)
    registered = registry.architecture_for(make_config().model_type)
    assert registered is not None
    return ParityCase(
        name=f"{shape}-{weight_format}",
        architecture=registered.value.name,
        make_config=make_config,
        weight_format=weight_format,
        row_lengths=((tokens,), (tokens - 37,)),
        lora={"rank": 16, "alpha": 32},
        num_steps=NUM_STEPS,
        length_bucket=64,
        loss_chunk_positions=Numerics().loss_chunk_positions,
        loss_chunk_vocabulary=Numerics().loss_chunk_vocabulary,
    )


def timed_steps(run: CaseRun, row_lengths: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    """Time whole optimizer steps without recording; the first is left out."""
    seconds = []
    run.engine.take_statistics()
    torch.cuda.reset_peak_memory_stats()
    case = replace(run.case, row_lengths=row_lengths)
    for index in range(TIMED_STEPS + 1):
        batches = case_micro_batches(case, int(run.model.config.vocab_size), index)
        torch.cuda.synchronize()
        start = time.perf_counter()
        run.engine.step(batches, index)
        run.optimizer.clip()
        run.optimizer.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        statistics = run.engine.take_statistics()
    step_seconds = min(seconds[1:])
    tokens = sum(sum(lengths) for lengths in row_lengths)
    return {
        "row_lengths": row_lengths,
        "step_seconds": step_seconds,
        "tokens_per_second": tokens / step_seconds,
        "all_step_seconds": seconds,
        "peak_device_bytes": torch.cuda.max_memory_allocated(),
        "h2d_bytes_per_step": statistics.h2d_bytes,
        "exposed_copy_seconds": statistics.exposed_copy_seconds,
    }


def run_plan(
    case: ParityCase,
    plan: Plan,
    registry: Registry,
    device: torch.device,
    *,
    timed: bool,
    fault: str | None = None,
) -> tuple[Trajectory, dict[str, Any]]:
    """Train the case under a plan; return its trajectory and what it cost."""
    gc.collect()
    torch.cuda.empty_cache()
    start = time.perf_counter()
    run = start_case(case, plan, registry, device, make_engine=CONTROLS[fault] if fault else None)
    facts: dict[str, Any] = {"load_seconds": time.perf_counter() - start}
    try:
        trajectory = run.train(case.num_steps)
        if timed:
            facts |= timed_steps(run, case.row_lengths)
            if plan.order == "block-major":
                facts["large_step"] = timed_steps(
                    run, ((case.row_lengths[0][0],),) * LARGE_STEP_MICRO_BATCHES
                )
        facts["store_bytes"] = sum(layout.num_bytes for layout in run.model.store.layouts)
    finally:
        run.close()
    return trajectory, facts


def gate(
    case: ParityCase, registry: Registry, device: torch.device, *, controls: Sequence[str], timed: bool
) -> dict[str, Any]:
    """Run oracle, repeat, plans and controls of one case. Untimed, only the first plan is walked."""
    resident = Plan(residency="resident")
    oracle, facts = run_plan(case, resident, registry, device, timed=timed)
    # Its repetition launches every kernel by itself: equal means that the run repeats and that graphs change no bit.
    again, _ = run_plan(case, replace(resident, graphs=False), registry, device, timed=False)
    results: dict[str, Any] = {"resident": facts | {"repeats": compare(oracle, again).outcome}}
    del again
    for name, plan in list(PLANS.items())[: None if timed else 1]:
        block_major = plan.order == "block-major"
        trajectory, facts = run_plan(case, plan, registry, device, timed=timed and block_major)
        verdict = compare(oracle, trajectory)
        results[name] = facts | {"plan": asdict(plan), "verdict": verdict.outcome, "detail": verdict.detail}
        print(case.name, name, verdict.outcome, verdict.detail, facts.get("step_seconds"), flush=True)
        del trajectory
    for fault in controls:
        trajectory, _ = run_plan(case, Plan(num_slots=2), registry, device, timed=False, fault=fault)
        verdict = compare(oracle, trajectory)
        results[f"control: {fault}"] = {"verdict": verdict.outcome, "detail": verdict.detail}
        print(case.name, fault, verdict.outcome, verdict.detail, flush=True)
    return results


def aliasing(case: ParityCase, registry: Registry, device: torch.device, tokens: int) -> dict[str, Any]:
    """Reproduce the `MatMul4Bit` fault on two blocks; empty where blocks read more than hidden states."""
    run = start_case(case, Plan(residency="resident"), registry, device)
    return {} if run.model.per_block is not None else asdict(reproduce_aliasing(run, tokens))


def passed(results: dict[str, Any]) -> bool:
    """Whether everything that must be equal is, and everything that must fail does."""
    for name, result in results.items():
        if name.startswith("control: "):
            good = result["verdict"] == "different"
        elif name == "aliasing":
            reproduced = result["output_equal"] and result["faulty_gradient_cosine"] < MAX_FAULTY_COSINE
            good = reproduced and result["visit_equal"]
        else:
            good = result.get("verdict", result.get("repeats")) == "equal"
        if not good:
            return False
    return True


def parse(cases: list[str]) -> Iterator[tuple[str, str, int | None]]:
    """Yield (shape, format, blocks) of SHAPE:FORMAT[:BLOCKS]."""
    for text in cases:
        shape, weight_format, *rest = text.split(":")
        if shape not in SHAPES:
            raise SystemExit(f"unknown shape `{shape}`: expected one of {sorted(SHAPES)}")
        yield shape, weight_format, int(rest[0]) if rest else None


def main() -> int:
    """Run every case, write receipts, print a table last."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="+", metavar="SHAPE:FORMAT[:BLOCKS]")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--controls", nargs="*", default=[], choices=sorted(CONTROLS))
    parser.add_argument("--untimed", action="store_true", help="verdicts only, under one plan")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    configure(device)
    registry = load_registry()
    link = link_bytes_per_second(device)
    ok = True
    for shape, weight_format, num_blocks in parse(arguments.cases):
        case = make_case(shape, weight_format, num_blocks, arguments.tokens, registry)
        config = case.make_config()
        try:
            results = gate(case, registry, device, controls=arguments.controls, timed=not arguments.untimed)
            if weight_format == "nf4" and (fault := aliasing(case, registry, device, arguments.tokens)):
                results["aliasing"] = fault
        except Exception:  # the cases after this one are still worth their device time
            traceback.print_exc()
            ok = False
            continue
        measured = {
            "claim": "residency",
            "shape": shape,
            "num_blocks": config.num_hidden_layers,
            "full_depth": num_blocks is None,
            "weight_format": weight_format,
            "row_lengths": case.row_lengths,
            "lora": dict(case.lora),
            "num_steps": case.num_steps,
            "link_bytes_per_second": link,
            "passed": passed(results),
            "results": results,
        }
        ok &= measured["passed"]
        kernels = registry.architectures[case.architecture].value().kernels()
        write_receipt(arguments.output / f"residency-{case.name}.json", device, measured, kernels)
        print(json.dumps({"case": case.name, "passed": measured["passed"]}), flush=True)
        for name, result in results.items():
            shown = {k: v for k, v in result.items() if isinstance(v, int | float | str) and k != "detail"}
            large = result.get("large_step")
            if large:
                shown["large"] = [
                    large["step_seconds"],
                    large["peak_device_bytes"],
                    large["exposed_copy_seconds"],
                ]
            print("  ", name, json.dumps(shown), flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
