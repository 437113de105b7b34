"""Reporters that need an extra: `report_to` names them, and nothing of theirs is imported before."""

from poros_cli.reporters.tensorboard import TensorBoardReporter
from poros_cli.reporters.wandb import WandbReporter

__all__ = ["TensorBoardReporter", "WandbReporter"]
