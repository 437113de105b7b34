"""The faults of ``poros verify --inject``: what each one breaks, and what must come of it.

A fault is *caught* if every part of it ends as expected. A broken engine must come out different. Unfavourable timing
is no fault: alone it must come out equal, and the same timing over an engine that leaves out the wait that it would
expose must come out different, which shows that the timing was unfavourable enough to prove something.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from poros.errors import ConfigError, explain
from poros.parity.faults import FAULTS, EngineMaker, delayed_copies, poison_before_refill
from poros.parity.stream_faults import (
    delayed_compute,
    early_overwrite,
    foreign_traffic,
    unwaited_behind_traffic,
)

__all__ = ["ALL", "CONTROLS", "DROPPED_MOMENT", "PARTS", "Control", "Part", "choose_controls"]

ALL = "all"
# The optimizer's first moment: the one that a resumed run would miss at once.
DROPPED_MOMENT = "exp_avg"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One run of a control.

    Attributes:
        name: unique.
        expected: the verdict of the comparison with the run that it disturbs.
        make_engine: the engine to use; None for a fault of the resumed run.
    """

    name: str
    expected: Literal["equal", "different"]
    make_engine: EngineMaker | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """A fault or an unfavourable timing by the name that ``--inject`` takes.

    Attributes:
        what: what it does, in words.
        parts: names of `PARTS`, all of which must end as expected.
        needs_gpu: it acts on CUDA streams.
    """

    name: str
    what: str
    parts: tuple[str, ...]
    needs_gpu: bool = False


_PARTS = (
    Part(name="early-refill", expected="different", make_engine=FAULTS["early-refill"]),
    Part(name="missing-wait", expected="different", make_engine=FAULTS["copy-not-waited-for"]),
    Part(name="poison-before-refill", expected="equal", make_engine=poison_before_refill),
    Part(name="poisoned-slot", expected="different", make_engine=FAULTS["poisoned-released-slot"]),
    Part(name="skipped-accumulation", expected="different", make_engine=FAULTS["skipped-accumulation"]),
    Part(name="dropped-moment", expected="different", make_engine=None),
    Part(name="late-copies", expected="equal", make_engine=delayed_copies),
    Part(name="late-compute", expected="equal", make_engine=delayed_compute),
    Part(name="late-compute-no-wait", expected="different", make_engine=early_overwrite),
    Part(name="busy-link", expected="equal", make_engine=foreign_traffic),
    Part(name="busy-link-no-wait", expected="different", make_engine=unwaited_behind_traffic),
)
PARTS = {part.name: part for part in _PARTS}

_CONTROLS = (
    Control(
        name="early-refill",
        what="a slot gets another block's bytes before its backward has read it",
        parts=("early-refill",),
    ),
    Control(
        name="missing-wait",
        what="copies run as late as they may, and a visit does not wait for its block",
        parts=("missing-wait",),
    ),
    Control(
        name="poisoned-slot",
        what="slots are filled with NaN: alone right before every copy, then on release although a block is read again",
        parts=("poison-before-refill", "poisoned-slot"),
    ),
    Control(
        name="skipped-accumulation",
        what="the last micro-batch's gradients are not added in one block",
        parts=("skipped-accumulation",),
    ),
    Control(
        name="dropped-moment",
        what="a resumed run starts with the first moment at zero",
        parts=("dropped-moment",),
    ),
    Control(
        name="delayed-copy-stream",
        what="every copy is late; alone, and where nobody waits for it",
        parts=("late-copies", "missing-wait"),
        needs_gpu=True,
    ),
    Control(
        name="delayed-compute-stream",
        what="every visit is late; alone, and where copies do not wait for the slot's last reader",
        parts=("late-compute", "late-compute-no-wait"),
        needs_gpu=True,
    ),
    Control(
        name="side-traffic",
        what="foreign copies fill the link both ways; alone, and where nobody waits for the block behind them",
        parts=("busy-link", "busy-link-no-wait"),
        needs_gpu=True,
    ),
)
CONTROLS = {control.name: control for control in _CONTROLS}


def choose_controls(names: tuple[str, ...]) -> tuple[Control, ...]:
    """Return the controls that were named, each once, in the order of `CONTROLS`; ``all`` is every one.

    Raises:
        ConfigError: no such fault.
    """
    for name in names:
        if name != ALL and name not in CONTROLS:
            raise ConfigError(
                explain(
                    "Unknown fault", expected=", ".join((*CONTROLS, ALL)), got=f"`{name}`", where="--inject"
                )
            )
    return tuple(control for control in _CONTROLS if ALL in names or control.name in names)
