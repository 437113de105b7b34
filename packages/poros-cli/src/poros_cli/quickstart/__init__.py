"""`poros quickstart`: a real small model from end to end."""

from poros_cli.quickstart.prepare import missing_distributions, prepare_model
from poros_cli.quickstart.tour import QUESTION, QuickstartReport, run_quickstart

__all__ = ["QUESTION", "QuickstartReport", "missing_distributions", "prepare_model", "run_quickstart"]
