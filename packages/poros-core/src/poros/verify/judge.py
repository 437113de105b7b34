"""Comparing two recorded sides, step by step, from their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from poros.parity.compare import Verdict, compare
from poros.parity.trajectory import Trajectory
from poros.verify.recorder import read_signatures, read_step

__all__ = ["judge"]


def judge(
    folder: Path, trusted: Mapping[str, Any], other: Mapping[str, Any], *, first: int, last: int
) -> Verdict:
    """Compare the steps ``first`` .. ``last - 1`` of two sides byte for byte, earliest first.

    A side that ended early is compared as far as it came: a difference before its end is one. Without a difference the
    verdict is ``cannot compare``, with the reason for which it ended.

    Args:
        folder: of all sides.
        trusted, other: results of `run_side`.
    """
    for side in (trusted, other):
        if "environment" not in side:
            return Verdict("cannot compare", _why(side), 0)
    if reason := _other_machine(trusted, other):
        return Verdict("cannot compare", reason, 0)
    count = 0
    try:
        signatures = [read_signatures(folder / side["name"]) for side in (trusted, other)]
    except FileNotFoundError:
        failed = trusted if trusted["failure"] else other
        return Verdict("cannot compare", _why(failed), 0)
    for step in range(first, last):
        a, b = (
            read_step(folder / side["name"], step, layout)
            for side, layout in zip((trusted, other), signatures, strict=True)
        )
        if a is None or b is None:
            return Verdict("cannot compare", _ended(trusted if a is None else other, step), count)
        common = a.tensors.keys() & b.tensors.keys()
        verdict = compare(_only(a, common), _only(b, common))
        count += verdict.num_tensors
        if verdict.outcome != "equal":
            return Verdict(verdict.outcome, verdict.detail, count, verdict.difference)
        if len(common) < max(len(a.tensors), len(b.tensors)):
            short = trusted if len(a.tensors) < len(b.tensors) else other
            return Verdict("cannot compare", _ended(short, step), count)
        for side in (trusted, other):
            if str(step) not in side["steps"]:  # both may have recorded the same part of it
                return Verdict("cannot compare", _ended(side, step), count)
    for side in (trusted, other):
        if side["failure"]:
            reason = f"the side `{side['name']}` failed after its last step: {side['failure']}"
            return Verdict("cannot compare", reason, count)
    return Verdict("equal", "", count)


def _only(trajectory: Trajectory, keys: Any) -> Trajectory:
    kept = {key: trajectory.tensors[key] for key in keys}
    return Trajectory(trajectory.signatures, kept, trajectory.kernels)


def _other_machine(trusted: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Say which kernels, versions or device differ; empty where none do."""
    named = []
    for name in ("environment", "kernels"):
        a, b = _flat(trusted[name]), _flat(other[name])
        named += [
            f"{key}: {a.get(key)} against {b.get(key)}"
            for key in sorted({*a, *b})
            if a.get(key) != b.get(key)
        ]
    return f"the runs used different kernels, versions or devices ({'; '.join(named)})" if named else ""


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    inner = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    for key, value in values.items():
        if isinstance(value, Mapping):
            inner |= {f"{key}.{name}": item for name, item in value.items()}
    return inner


def _why(side: Mapping[str, Any]) -> str:
    kind = "ran out of memory" if side["out_of_memory"] else "did not run"
    return f"the side `{side['name']}` {kind}: {side['failure']}"


def _ended(side: Mapping[str, Any], step: int) -> str:
    return f"the side `{side['name']}` ended in step {step + 1}: {side['failure'] or 'no reason is known'}"
