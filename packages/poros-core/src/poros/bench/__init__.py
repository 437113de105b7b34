"""Measuring whole optimizer steps: time, memory and traffic of a plan, resident and streamed side by side.

Each configuration is measured in a process of its own, so that its peak and its CUDA context are its own.
"""

from poros.bench.memory import MemoryMeter
from poros.bench.processes import SpareProcess, run_spec
from poros.bench.report import bound_share, slowdown, with_floor
from poros.bench.spec import BenchSpec
from poros.bench.timing import StepTimes, time_steps
from poros.bench.worker import serve

__all__ = [
    "BenchSpec",
    "MemoryMeter",
    "SpareProcess",
    "StepTimes",
    "bound_share",
    "run_spec",
    "serve",
    "slowdown",
    "time_steps",
    "with_floor",
]
