"""The receipt of `poros verify`: JSON that can be attached to a paper or a bug report."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import poros
from poros.checkpoint import atomic_write_json
from poros_cli.verify.run import Verification
from poros_cli.verify.text import conclusion, difference_sentence

__all__ = ["receipt", "without_paths", "write_receipt"]

# An absolute path, at the start of a text or behind something that no relative path contains.
ABSOLUTE = re.compile(r"(?<![\w./~-])~?/(?:[^\s/'\"`,;:()]+/)+([^\s/'\"`,;:()]*)")
SIDE_FIELDS = (
    *("name", "num_blocks", "whole_num_blocks", "plan", "plan_changed", "kernels", "predicted_device_bytes"),
    *("h2d_bytes", "side_traffic_bytes", "seconds", "steps", "failure", "out_of_memory"),
)


def receipt(found: Verification, exit_code: int) -> dict[str, Any]:
    """Return everything that was compared and found, without any path of this machine."""
    streamed = found.sides.get("streamed", {})
    content = {
        "kind": "poros verify",
        "environment": {
            **found.environment,
            "command": " ".join(["poros", *sys.argv[1:]]),
            "commit": _commit(),
        },
        "subject": dict(found.about),
        "fingerprint": streamed.get("fingerprint"),
        "num_steps": found.num_steps,
        "notes": found.notes,
        "checks": [
            {
                "name": check.name,
                "what": check.what,
                "sides": list(check.sides),
                "first_step": check.first + 1,
                "last_step": check.last,
                "outcome": check.verdict.outcome,
                "num_tensors": check.verdict.num_tensors,
                "detail": difference_sentence(check.verdict),
                "difference": None if check.verdict.difference is None else asdict(check.verdict.difference),
            }
            for check in found.checks
        ],
        "controls": [
            {
                "fault": outcome.control.name,
                "what": outcome.control.what,
                "parts": list(outcome.control.parts),
                "expected": list(outcome.expected),
                "got": list(outcome.got),
                "details": list(outcome.details),
                "caught": outcome.caught,
            }
            for outcome in found.controls
        ],
        "sides": [
            {name: side[name] for name in SIDE_FIELDS if name in side} for side in found.sides.values()
        ],
        "conclusion": conclusion(found),
        "exit_code": exit_code,
    }
    return dict(without_paths(content))


def without_paths(value: Any) -> Any:
    """Return JSON values with absolute paths cut to their last part: where files lie is nobody's business."""
    if isinstance(value, str):
        return ABSOLUTE.sub(r"\1", value)
    if isinstance(value, Mapping):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(item) for item in value]
    # NaN and infinity are no JSON; they are what a fault leaves behind.
    return repr(value) if isinstance(value, float) and not abs(value) < float("inf") else value


def write_receipt(file: Path, found: Verification, exit_code: int) -> None:
    """Write the receipt."""
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_json(file, receipt(found, exit_code))


def _commit() -> str | None:
    """Return the commit of Poros' own tree; None where it was installed: then the versions say which it is."""
    source = Path(poros.__file__).resolve()
    git = ("git", "-C", str(source.parent))
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", source.name], capture_output=True, check=True)
        described = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()
