"""The reporter that docs/plugins.md prints is complete, short and works."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import poros
from poros.plugins import load_registry
from poros.run.reporters import make_reporters

PAGE = Path(__file__).resolve().parents[3] / "docs" / "plugins.md"
# What the page's heading promises: neither blank lines nor the line that names the file.
MAX_CODE_LINES = 20


def printed() -> str:
    (code,) = re.findall(r"```python\n# my_package/reporters.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(code)


def test_the_printed_reporter_is_as_short_as_the_page_says() -> None:
    assert len([line for line in printed().splitlines() if line.strip()]) <= MAX_CODE_LINES


def test_the_printed_reporter_records_every_step_of_a_run(
    make_trainer: Callable[..., poros.Trainer], make_steps: Any, tmp_path: Path
) -> None:
    module = ModuleType("my_package.reporters")
    exec(printed(), vars(module))
    registry = load_registry([("my-plugin", "my-dist", module)])
    output = tmp_path / "run"
    named = make_reporters(("steps-csv",), registry, output)
    steps = make_steps(num_rows=3, accumulation=1, epochs=1)
    with make_trainer(output, steps=steps, reporters=named) as trainer:
        result = trainer.run()
    with (output / "steps.csv").open() as file:
        rows = list(csv.reader(file))
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert float(rows[-1][1]) == result.last_loss


def test_the_page_names_every_event_that_a_reporter_can_have() -> None:
    text = PAGE.read_text()
    assert all(f"`{name}`" in text for name in vars(poros.Reporter) if name.startswith("on_"))
