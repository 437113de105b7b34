"""The training loop, its checkpoints and its events."""

from poros.run.events import (
    CheckpointEvent,
    EvalEvent,
    Reporter,
    RunResult,
    StartEvent,
    StepEvent,
    WarmUpEvent,
)
from poros.run.opening import OpenModel, describe_model, open_model
from poros.run.settings import RunSettings
from poros.run.trainer import Trainer

__all__ = [
    "CheckpointEvent",
    "EvalEvent",
    "OpenModel",
    "Reporter",
    "RunResult",
    "RunSettings",
    "StartEvent",
    "StepEvent",
    "Trainer",
    "WarmUpEvent",
    "describe_model",
    "open_model",
]
