"""Drawing plans and numerics settings: whatever plan is drawn, a setting has one state hash.

Needs hypothesis, which Poros does not require at run time: only tests and `validation/every_plan.py` import this.

Shape letters: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import torch
from hypothesis import strategies as st

from poros.blocks.store_cache import StoreCache
from poros.interfaces import ParityCase
from poros.parity.case_run import start_case
from poros.parity.compare import compare
from poros.parity.trajectory import Trajectory
from poros.plugins import Registry
from poros.settings import ACCUMULATION_ORDERS, DTYPE_NAMES, PLACES, Plan, named_dtypes

__all__ = ["PLANS", "PlanTrials", "Setting", "eager_cases", "settings_of"]

RESIDENT = Plan(residency="resident")
# Two steps: the second one starts with the weights, moments and slots that the first one left.
NUM_STEPS = 2
MAX_MICRO_BATCHES, MAX_ROWS, MAX_TOKENS = 4, 3, 20
DROPOUT, NEFTUNE_ALPHA = 0.3, 5.0


def _streamed(resident_blocks: int) -> st.SearchStrategy[Plan]:
    """Return the plans with so many blocks in device memory; only these can keep their forward."""
    return st.builds(
        Plan,
        num_slots=st.integers(2, 7),
        resident_blocks=st.just(resident_blocks),
        kept_blocks=st.integers(0, resident_blocks),
        disk_blocks=st.just(0) | st.integers(1, 6),
        head=st.sampled_from(PLACES),
        activations=st.sampled_from(PLACES),
        order=st.sampled_from(ACCUMULATION_ORDERS),
        workspace=st.booleans(),
        graphs=st.booleans(),
        pin_host_memory=st.booleans(),
    )


PLANS: st.SearchStrategy[Plan] = st.integers(0, 6).flatmap(_streamed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What decides bits: a family's tiny model, its compute dtype, its rows, dropout and NEFTune on or off.

    Attributes:
        case: name of a registered parity case; its model, adapters and weight format are used.
        row_lengths: per micro-batch, the tokens of its rows.
    """

    case: str
    compute_dtype: str
    row_lengths: tuple[tuple[int, ...], ...]
    dropout: bool
    neftune: bool = False

    def make_case(self, registry: Registry) -> ParityCase:
        """Return the parity case of this setting."""
        case: ParityCase = registry.parity_cases()[self.case].value
        lora = {**case.lora, "dropout": DROPOUT if self.dropout else 0.0}
        return replace(
            case,
            compute_dtype=named_dtypes()[self.compute_dtype],
            row_lengths=self.row_lengths,
            lora=MappingProxyType(lora),
            num_steps=NUM_STEPS,
            neftune_alpha=NEFTUNE_ALPHA if self.neftune else 0.0,
        )


def eager_cases(registry: Registry) -> list[str]:
    """Return the names of the registered cases that compile nothing."""
    return sorted(name for name, case in registry.parity_cases().items() if case.value.blocks == "eager")


def settings_of(cases: Sequence[str]) -> st.SearchStrategy[Setting]:
    """Return a strategy of settings over the named cases."""
    rows = st.lists(st.integers(2, MAX_TOKENS), min_size=1, max_size=MAX_ROWS).map(tuple)
    return st.builds(
        Setting,
        case=st.sampled_from(list(cases)),
        compute_dtype=st.sampled_from(sorted(DTYPE_NAMES)),
        row_lengths=st.lists(rows, min_size=1, max_size=MAX_MICRO_BATCHES).map(tuple),
        dropout=st.booleans(),
        neftune=st.booleans(),
    )


@dataclass(slots=True)
class PlanTrials:
    """Runs drawn plans and holds each setting to the hash of its truly resident run.

    Attributes:
        cache: folder for the stores whose blocks come from the disk.
        draws: plans that were tried, repeated ones included.
        draws_from_disk: those whose run read blocks from the disk.
        plans: the different ones.
        hashes: per setting, the sha256 of its whole trajectory.
    """

    registry: Registry
    device: torch.device
    cache: Path
    draws: int = 0
    draws_from_disk: int = 0
    plans: set[Plan] = field(default_factory=set)
    hashes: dict[Setting, str] = field(default_factory=dict)
    families: set[str] = field(default_factory=set)
    _disk_bytes: int = 0

    def try_plan(self, setting: Setting, plan: Plan) -> None:
        """Run ``setting`` under ``plan``.

        Raises:
            AssertionError: its state hash is not the resident run's; the first difference is named.
        """
        if setting not in self.hashes:
            self.hashes[setting] = self._train(setting, RESIDENT).digest()
        trajectory = self._train(setting, plan)
        if trajectory.digest() != self.hashes[setting]:
            detail = compare(self._train(setting, RESIDENT), trajectory).detail
            raise AssertionError(f"{setting} under {plan}: {detail}")
        self.draws += 1
        self.draws_from_disk += self._disk_bytes > 0
        self.plans.add(plan)

    def _train(self, setting: Setting, plan: Plan) -> Trajectory:
        case = setting.make_case(self.registry)
        self.families.add(case.architecture)
        cache = StoreCache(self.cache / setting.case) if plan.disk_blocks else None
        run = start_case(case, plan, self.registry, self.device, cache=cache)
        try:
            trajectory = run.train(NUM_STEPS)
            self._disk_bytes = run.engine.take_statistics().disk_bytes
            return trajectory
        finally:
            run.close()
