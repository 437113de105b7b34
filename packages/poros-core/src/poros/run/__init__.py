"""The training loop, its checkpoints and its events."""

from poros.run.evaluating import SamplePrompt, SamplePrompts
from poros.run.events import (
    CheckpointEvent,
    EvalEvent,
    Reporter,
    RunResult,
    SampleEvent,
    StartEvent,
    StepEvent,
    WarmUpEvent,
)
from poros.run.final_adapter import save_final_adapter
from poros.run.from_config import train
from poros.run.opening import OpenModel, describe_model, open_model
from poros.run.placement import plan_run
from poros.run.settings import RunSettings
from poros.run.trainer import Trainer

__all__ = [
    "CheckpointEvent",
    "EvalEvent",
    "OpenModel",
    "Reporter",
    "RunResult",
    "RunSettings",
    "SampleEvent",
    "SamplePrompt",
    "SamplePrompts",
    "StartEvent",
    "StepEvent",
    "Trainer",
    "WarmUpEvent",
    "describe_model",
    "open_model",
    "plan_run",
    "save_final_adapter",
    "train",
]
