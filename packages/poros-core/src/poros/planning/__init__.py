"""The planner: from memory budgets to where everything lives, with predicted bytes and seconds."""

from poros.planning.advice import Advice, advise
from poros.planning.planner import PlannedRun, make_plan
from poros.planning.prediction import Prediction, predict
from poros.planning.rates import ASSUMED_RATES, Rates, assumed_rates
from poros.planning.request import Budget, PlanRequest
from poros.planning.shape import StepShape
from poros.planning.step_time import StepTime

__all__ = [
    "ASSUMED_RATES",
    "Advice",
    "Budget",
    "PlanRequest",
    "PlannedRun",
    "Prediction",
    "Rates",
    "StepShape",
    "StepTime",
    "advise",
    "assumed_rates",
    "make_plan",
    "predict",
]
