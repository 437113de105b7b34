"""Data for Poros: JSON Lines formats, chat templates, supervised-token masks, batching."""

from poros_data.batching import Batch, StepPlan, eval_batches, padding_id
from poros_data.dataset import Dataset, load_dataset
from poros_data.errors import DataError
from poros_data.report import Count, DataReport
from poros_data.rows import IGNORED, Row
from poros_data.schemas import SCHEMAS, Schema

__all__ = [
    "IGNORED",
    "SCHEMAS",
    "Batch",
    "Count",
    "DataError",
    "DataReport",
    "Dataset",
    "Row",
    "Schema",
    "StepPlan",
    "eval_batches",
    "load_dataset",
    "padding_id",
]
