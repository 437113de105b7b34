"""The answers of a run over its steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poros.run.metrics import SAMPLES_FILE

__all__ = ["PromptAnswers", "prompt_answers"]

# Of one prompt; the first shows where the run came from.
MAX_SHOWN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptAnswers:
    """A prompt and its answers: (after which step, text), ascending.

    Attributes:
        left_out: answers between the first and the last ones that are not shown.
    """

    prompt: str
    answers: Sequence[tuple[str, str]]
    left_out: int


def prompt_answers(folder: Path) -> list[PromptAnswers]:
    """Return the answers of a run by prompt, in order; lines that cannot be read are left out."""
    try:
        lines = (folder / SAMPLES_FILE).read_bytes().decode("utf-8", errors="replace").split("\n")
    except OSError:
        return []
    found: dict[tuple[int, str], dict[int, str]] = {}
    for line in lines:
        value = _sample(line)
        if value is not None:
            text = value["text"] + ("" if value.get("ended") else " [cut]")
            found.setdefault((value["index"], value["prompt"]), {})[value["step"]] = text
    return [_shown(prompt, answers) for (_, prompt), answers in sorted(found.items())]


def _shown(prompt: str, answers: dict[int, str]) -> PromptAnswers:
    rows = [(f"step {step}", answers[step]) for step in sorted(answers)]
    shown = rows if len(rows) <= MAX_SHOWN else [rows[0], *rows[1 - MAX_SHOWN :]]
    return PromptAnswers(prompt=prompt, answers=shown, left_out=len(rows) - len(shown))


def _sample(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    numbers = all(type(value.get(name)) is int for name in ("step", "index"))
    texts = all(isinstance(value.get(name), str) for name in ("prompt", "text"))
    return value if numbers and texts else None
