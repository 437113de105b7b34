"""Data for Poros: row formats, chat templates, supervised-token masks, batching."""

from poros_data.batching import Batch, eval_batches, padding_id
from poros_data.dataset import Dataset, load_dataset
from poros_data.errors import DataError
from poros_data.report import Count, DataReport, SourceReport
from poros_data.rows import IGNORED, Row
from poros_data.schemas import SCHEMAS, Schema
from poros_data.settings import ORDERS, TRUNCATIONS, RowSettings
from poros_data.sources import DataFile, Source, Sources, as_sources
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
    "load_dataset",
    "padding_id",
]
