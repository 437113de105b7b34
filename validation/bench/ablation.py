"""A Poros worker with one cost taken out, to see what it is worth. What it trains is wrong: its times alone count.

Copies are taken out by a resident run and launches by graphs, both of which are valid runs. Dequantization is taken out
here: the workspace is filled once and never again, so every block computes with the matrices of the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from poros.bench import serve

NOT_A_RUN = "timing only: every block computes with the matrices of the first, so what was trained is wrong"


def run_without(values: Mapping[str, Any]) -> dict[str, Any]:
    """Measure a spec with the workspace left as the first visit filled it."""
    from poros.bench.measure import run
    from poros.engine.template import BlockTemplate

    if values["without"] != "dequantization":
        raise ValueError(f"expected `dequantization`, got `{values['without']}`")
    fill = BlockTemplate.materialize
    filled = False

    def fill_once(template: BlockTemplate) -> None:
        nonlocal filled
        if not filled:
            fill(template)
            filled = True

    BlockTemplate.materialize = fill_once  # type: ignore[method-assign]
    try:
        return run(values) | {"not_a_valid_run": NOT_A_RUN}
    finally:
        BlockTemplate.materialize = fill  # type: ignore[method-assign]


if __name__ == "__main__":
    serve(run_without)
