"""The comparisons of `poros verify`, in order: repeatability, streamed against resident, restart, faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from poros.parity.compare import Verdict
from poros.verify.controls import PARTS, Control
from poros.verify.judge import judge
from poros.verify.side import SideSpec, control_plan, plan_for_blocks
from poros_cli.verify.processes import Worker

__all__ = ["CANNOT_COMPARE", "NEEDS_GPU", "Check", "ControlOutcome", "Verification", "verify"]

NEEDS_GPU = "needs a GPU"
CANNOT_COMPARE = "cannot compare"
Side = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One comparison of two sides.

    Attributes:
        name: ``repeatability``, ``residency`` or ``restart``.
        what: the comparison in words.
        sides: names of the trusted side and the other one.
        first, last: compared are the steps from ``first`` up to but not including ``last``, from 0.
    """

    name: str
    what: str
    sides: tuple[str, str]
    first: int
    last: int
    verdict: Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlOutcome:
    """What came of one fault.

    Attributes:
        expected, got: per part.
    """

    control: Control
    expected: tuple[str, ...]
    got: tuple[str, ...]
    details: tuple[str, ...]

    @property
    def tried(self) -> bool:
        """Whether this machine can run it."""
        return NEEDS_GPU not in self.got

    @property
    def caught(self) -> bool | None:
        """Every part ended as expected; None where nobody can say: not tried, or a part could not be compared."""
        if self.got == self.expected:
            return True
        unknown = (NEEDS_GPU, CANNOT_COMPARE)
        wrong = [g for e, g in zip(self.expected, self.got, strict=True) if g not in (e, *unknown)]
        return False if wrong else None


@dataclass(slots=True)
class Verification:
    """Everything that was found.

    Attributes:
        notes: sentences that limit what was compared; the user must see them.
        sides: results by name.
    """

    num_steps: int
    environment: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    sides: dict[str, Side] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    controls: list[ControlOutcome] = field(default_factory=list)

    def exit_code(self, asked: Sequence[str]) -> int:
        """Return 0 if all is equal and every fault was caught, 1 if not, 3 if something could not be compared.

        Args:
            asked: faults that were asked for by name: one that could not be tried is a comparison that was not made.
        """
        outcomes = [check.verdict.outcome for check in self.checks]
        if "different" in outcomes or any(outcome.caught is False for outcome in self.controls):
            return 1
        unknown = any(o.caught is None and (o.tried or o.control.name in asked) for o in self.controls)
        return 3 if CANNOT_COMPARE in outcomes or unknown else 0


def verify(
    worker: Worker,
    *,
    num_steps: int,
    controls: Sequence[Control],
    resident_bytes: int | None,
    say: Callable[[str], None],
) -> Verification:
    """Run every side and compare.

    Args:
        worker: starts processes.
        num_steps: optimizer steps of every side; fewer if the run is shorter.
        controls: faults to try.
        resident_bytes: device memory that the resident side may take; None is what is free.
        say: shows a line to the user.
    """
    return _Run(worker, num_steps, resident_bytes, say).all(controls)


class _Run:
    def __init__(
        self, worker: Worker, num_steps: int, resident_bytes: int | None, say: Callable[[str], None]
    ) -> None:
        self._worker, self._say, self._resident_bytes = worker, say, resident_bytes
        self.found = Verification(num_steps)

    def all(self, controls: Sequence[Control]) -> Verification:
        found = self.found
        streamed = self._side(SideSpec(name="streamed", steps=found.num_steps), tell=True)
        if "plan" not in streamed:  # nothing to compare with
            verdict = judge(self._worker.folder, streamed, streamed, first=0, last=1)
            self._add("residency", "streamed = resident", ("streamed", "streamed"), 0, verdict)
            return found
        if note := streamed.get("plan_changed"):
            self._note(note)
        if streamed["num_steps"] < found.num_steps:
            self._note(f"The run has {streamed['num_steps']} optimizer steps, so no more were compared.")
            found.num_steps = streamed["num_steps"]
        self._side(SideSpec(name="again", steps=found.num_steps, plan=streamed["plan"]))
        repeats = self._judge("streamed", "again")
        self._add("repeatability", "streamed twice, in two processes", ("streamed", "again"), 0, repeats)
        self._residency(repeats)
        self._restart(repeats)
        if controls:
            self._controls(controls)
        return found

    # ---- checks

    def _residency(self, repeats: Verdict) -> None:
        resident = self._side(
            SideSpec(
                name="resident",
                residency="resident",
                steps=self.found.num_steps,
                resident_bytes=self._resident_bytes,
            )
        )
        partner, what = "streamed", "streamed = resident"
        count, whole = resident.get("num_blocks", 0), resident.get("whole_num_blocks", 0)
        if count < whole:
            partner, what = "streamed-cut", f"streamed = resident, first {count} of {whole} blocks"
            self._note(
                f"The whole resident run does not fit this device. Streamed and resident are compared on the first "
                f"{count} of {whole} blocks; the whole model is compared with itself only (repeatability, restart)."
            )
            plan = plan_for_blocks(self.found.sides["streamed"]["plan"], count, whole)
            self._side(SideSpec(name=partner, steps=self.found.num_steps, plan=plan, num_blocks=count))
        verdict = self._unless_unrepeated(repeats, self._judge("resident", partner))
        if verdict.outcome == "different":
            verdict = self._unless_resident_varies(resident, verdict)
        self._add("residency", what, ("resident", partner), 0, verdict)

    def _unless_resident_varies(self, resident: Side, verdict: Verdict) -> Verdict:
        """A difference counts only where the resident run repeats itself."""
        cut = resident["num_blocks"] if resident["num_blocks"] < resident["whole_num_blocks"] else None
        self._side(
            SideSpec(
                name="resident-again",
                residency="resident",
                steps=self.found.num_steps,
                plan=resident["plan"],
                num_blocks=cut,
            )
        )
        repeats = self._judge("resident", "resident-again")
        if repeats.outcome == "equal":
            return verdict
        reason = f"the resident run does not repeat itself: {repeats.detail}"
        return Verdict("cannot compare", reason, verdict.num_tensors)

    def _restart(self, repeats: Verdict) -> None:
        half = self.found.num_steps // 2
        what = f"stopped after step {half}, resumed in a new process"
        sides = ("streamed", "resumed")
        if half == 0:
            verdict = Verdict("cannot compare", "a run of one step has no step to resume at", 0)
            self._add("restart", what, sides, 0, verdict)
            return
        plan = self.found.sides["streamed"]["plan"]
        self._side(SideSpec(name="stopped", steps=half, plan=plan, keep_checkpoint=True))
        self._side(SideSpec(name="resumed", steps=self.found.num_steps, plan=plan, resume_from="stopped"))
        verdict = self._unless_unrepeated(repeats, self._judge(*sides, first=half))
        self._add("restart", what, sides, half, verdict)

    @staticmethod
    def _unless_unrepeated(repeats: Verdict, verdict: Verdict) -> Verdict:
        if repeats.outcome == "equal":
            return verdict
        reason = f"the streamed run does not repeat itself: {repeats.detail}"
        return Verdict("cannot compare", reason, verdict.num_tensors)

    # ---- faults

    def _controls(self, controls: Sequence[Control]) -> None:
        """Run every part that the controls need, each once, all in one process, and judge."""
        on_gpu = self.found.environment.get("device", "").startswith("cuda")
        tried = [control for control in controls if on_gpu or not control.needs_gpu]
        names = list(dict.fromkeys(part for control in tried for part in control.parts))
        streamed = self.found.sides["streamed"]
        specs = [self._part_spec(name, streamed["plan"]) for name in names]
        if specs:
            self._sides(specs)
        half = self.found.num_steps // 2
        verdicts = {
            spec.name: self._judge("streamed", spec.name, first=half if spec.resume_from else 0)
            for spec in specs
        }
        for control in controls:
            expected = tuple(PARTS[name].expected for name in control.parts)
            if control not in tried:
                outcome = (NEEDS_GPU,) * len(expected)
                self.found.controls.append(
                    ControlOutcome(control=control, expected=expected, got=outcome, details=())
                )
                continue
            got = tuple(verdicts[name].outcome for name in control.parts)
            details = tuple(verdicts[name].detail for name in control.parts)
            self.found.controls.append(
                ControlOutcome(control=control, expected=expected, got=got, details=details)
            )

    def _part_spec(self, name: str, plan: dict[str, Any]) -> SideSpec:
        resumed = PARTS[name].make_engine is None
        return SideSpec(
            name=name,
            steps=self.found.num_steps,
            plan=plan if resumed else control_plan(plan),
            part=name,
            resume_from="stopped" if resumed else None,
        )

    # ---- helpers

    def _side(self, spec: SideSpec, *, tell: bool = False) -> Side:
        (side,) = self._sides([spec], tell=tell)
        return side

    def _sides(self, specs: Sequence[SideSpec], *, tell: bool = False) -> tuple[Side, ...]:
        if len(specs) > 1:
            self._say(f"Running {len(specs)} runs with faults: {', '.join(spec.name for spec in specs)} ...")
        else:
            self._say(f"Running `{specs[0].name}`: {specs[0].steps} steps ...")
        result = self._worker.run(specs)
        if tell:
            for line in result.said:
                self._say(line)
            self.found.environment, self.found.about = result.environment, result.about
        for side in result.sides:
            self.found.sides[side["name"]] = side
        return result.sides

    def _judge(self, trusted: str, other: str, first: int = 0) -> Verdict:
        sides = self.found.sides
        return judge(
            self._worker.folder, sides[trusted], sides[other], first=first, last=self.found.num_steps
        )

    def _note(self, text: str) -> None:
        self.found.notes.append(text)
        self._say(f"Note: {text}")

    def _add(self, name: str, what: str, sides: tuple[str, str], first: int, verdict: Verdict) -> None:
        self.found.checks.append(
            Check(name=name, what=what, sides=sides, first=first, last=self.found.num_steps, verdict=verdict)
        )
