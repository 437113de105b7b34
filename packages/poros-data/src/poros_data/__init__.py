"""Data for Poros: row formats, chat templates, supervised-token masks, batching.

Names are imported on first use: settings alone take no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poros_data.batching import Batch, eval_batches, padding_id
    from poros_data.dataset import Dataset, load_dataset
    from poros_data.errors import DataError
    from poros_data.report import Count, DataReport, SourceReport
    from poros_data.rows import IGNORED, Row
    from poros_data.schemas import SCHEMAS, Schema
    from poros_data.settings import ORDERS, TRUNCATIONS, RowSettings
    from poros_data.sources import DataFile, Source, Sources, as_sources
    from poros_data.splitting import hold_out
    from poros_data.steps import StepPlan

__all__ = [
    "IGNORED",
    "ORDERS",
    "SCHEMAS",
    "TRUNCATIONS",
    "Batch",
    "Count",
    "DataError",
    "DataFile",
    "DataReport",
    "Dataset",
    "Row",
    "RowSettings",
    "Schema",
    "Source",
    "SourceReport",
    "Sources",
    "StepPlan",
    "as_sources",
    "eval_batches",
    "hold_out",
    "load_dataset",
    "padding_id",
]

_HOMES = {
    "poros_data.batching": (
        "Batch",
        "eval_batches",
        "padding_id",
    ),
    "poros_data.dataset": (
        "Dataset",
        "load_dataset",
    ),
    "poros_data.errors": ("DataError",),
    "poros_data.report": (
        "Count",
        "DataReport",
        "SourceReport",
    ),
    "poros_data.rows": (
        "IGNORED",
        "Row",
    ),
    "poros_data.schemas": (
        "SCHEMAS",
        "Schema",
    ),
    "poros_data.settings": (
        "ORDERS",
        "TRUNCATIONS",
        "RowSettings",
    ),
    "poros_data.sources": (
        "DataFile",
        "Source",
        "Sources",
        "as_sources",
    ),
    "poros_data.splitting": ("hold_out",),
    "poros_data.steps": ("StepPlan",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module `poros_data` has no attribute `{name}`")
