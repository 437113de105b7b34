"""What the bench measures, as data: shapes, steps, plans, budgets and the targets they are held against.

GB are 1e9 bytes and a budget holds the whole process: CUDA context and peak reserved memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig, Qwen2Config

from poros_arch_qwen.real_shapes import real_config

GB = 1_000_000_000
TINY = "tiny"
SHAPES = MappingProxyType({"7b": "qwen2.5-7b", "32b": "qwen2.5-32b", "72b": "qwen2.5-72b", TINY: TINY})
PEERS = ("peft", "unsloth", "soup")
HOST: Mapping[str, Any] = {"activations": "host"}
# Compiled blocks read their matrices from the workspace.
WORKSPACE: Mapping[str, Any] = {"activations": "host", "workspace": True}
SMALLEST: Mapping[str, Any] = {"num_slots": 2, "head": "host", "activations": "host"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model's shape and an optimizer step's."""

    name: str
    shape: str
    micro_batches: int = 1
    micro_batch_size: int = 1
    tokens: int = 512
    quantization: str = "nf4"

    @property
    def tokens_per_step(self) -> int:
        """Positions of one optimizer step."""
        return self.micro_batches * self.micro_batch_size * self.tokens


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement: a case under one system and, for Poros, one plan.

    Attributes:
        system: ``poros-streamed``, ``poros-resident``, ``check`` (both, compared bit by bit) or a peer.
        blocks: ``eager`` or ``compiled``.
        planned: the planner decides what ``plan`` leaves open, within the budget.
        label: tells rows of one case, system and `blocks` apart.
        budget_gb: the process may take no more device memory; it fails if it needs more.
        target_seconds, target_gb: what the median step and the peak should stay below; None without a target.
        settings: a peer's own choices.
        without: ``dequantization``: removed for its timing alone; see `ablation.py`.
        num_blocks: depth that the model is cut to; None is the full depth.
    """

    case: Case
    system: str
    blocks: str = "eager"
    label: str = ""
    planned: bool = False
    plan: Mapping[str, Any] = field(default_factory=dict)
    numerics: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    budget_gb: float | None = None
    target_seconds: float | None = None
    target_gb: float | None = None
    without: str = ""
    num_blocks: int | None = None
    oracle_graphs: bool = True

    @property
    def name(self) -> str:
        """Unique, and the receipt's file name."""
        poros = self.system not in PEERS
        parts = [self.case.name, self.system, self.blocks if poros else "", self.label]
        depth = f"{self.num_blocks}-blocks" if self.num_blocks else ""
        return "/".join(part for part in [*parts, depth] if part)

    @property
    def file_name(self) -> str:
        """The receipt's file name."""
        return f"bench-{self.name.replace('/', '-')}.json"


def make_config(shape: str, num_blocks: int | None = None) -> PreTrainedConfig:
    """Return a case's config, cut to ``num_blocks`` blocks if given."""
    if shape != TINY:
        return real_config(SHAPES[shape], num_blocks)
    return Qwen2Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_blocks or 4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )


def _steps(shape: str) -> dict[str, Case]:
    """The steps of the table, by name."""
    return {
        step: Case(name=f"{shape}-{step}", shape=shape, **values)
        for step, values in {
            "512": {},
            "2048": {"tokens": 2048},
            "2x512": {"micro_batch_size": 2},
            "4x512": {"micro_batch_size": 4},
            "8x512": {"micro_batch_size": 8},
            "16x512": {"micro_batch_size": 16},
            "8mb": {"micro_batches": 8},
        }.items()
    }


def _streamed(case: Case, blocks: str, seconds: float | None, gb: float | None, **more: Any) -> Row:
    """A row whose target for memory is also the limit that it runs under."""
    return Row(
        case=case,
        system="poros-streamed",
        blocks=blocks,
        target_seconds=seconds,
        target_gb=gb,
        budget_gb=gb,
        **more,
    )


def _targets() -> Iterator[Row]:
    """The project's own targets, streamed; compiled ones are what the same plans must reach with compiled blocks."""
    small, large, huge = _steps("7b"), _steps("32b"), _steps("72b")
    yield _streamed(small["512"], "eager", 0.15, 3, plan={"head": "host"})
    yield _streamed(small["8x512"], "compiled", 0.35, 5, plan=WORKSPACE)
    yield _streamed(small["8mb"], "compiled", 0.48, 4, plan=WORKSPACE)
    yield _streamed(small["2048"], "compiled", 0.19, 4, plan={**WORKSPACE, "head": "host"})
    yield _streamed(large["512"], "eager", 0.62, 7, plan={})
    yield _streamed(large["512"], "eager", 0.36, 16, plan={"resident_blocks": 36}, label="16gb")
    yield _streamed(large["8x512"], "compiled", 1.5, 9, plan=WORKSPACE)
    yield _streamed(large["8x512"], "eager", 1.75, 9, plan=HOST)
    yield _streamed(large["8mb"], "compiled", 1.75, 7, plan=WORKSPACE)
    yield _streamed(large["8mb"], "eager", 2.1, 7, plan=WORKSPACE)
    yield _streamed(large["2048"], "compiled", 0.80, 8, plan=WORKSPACE)
    yield _streamed(large["512"], "eager", None, 4.5, plan=SMALLEST, label="smallest")
    yield _streamed(huge["512"], "eager", None, 8, plan=SMALLEST)


def _planned(rows: Sequence[Row]) -> Iterator[Row]:
    """The same targets and budgets, placed by the planner."""
    for row in rows:
        label = "-".join(part for part in (row.label, "planned") if part)
        yield replace(row, plan={"residency": "streamed"}, planned=True, label=label)


def _large_budgets() -> Iterator[Row]:
    """What memory beyond the small budgets buys: blocks that stay, and backward visits without recompute."""
    for shape, budgets in {"7b": (9, 12, 16, 24, 36), "32b": (26, 36, 48)}.items():
        for budget in budgets:
            for system in ("poros-streamed", "check"):
                yield Row(
                    case=_steps(shape)["8x512"],
                    system=system,
                    blocks="compiled",
                    label=f"{budget}gb-planned",
                    plan={"residency": "streamed"},
                    planned=True,
                    budget_gb=budget,
                )
        settings = {"gradient_checkpointing": False}
        yield Row(case=_steps(shape)["8x512"], system="unsloth", label="no-checkpointing", settings=settings)


def _bf16() -> Iterator[Row]:
    case = Case(name="32b-bf16-8mb", shape="32b", micro_batches=8, quantization="bf16_bitwise")
    yield Row(case=case, system="poros-streamed", plan=HOST)
    yield Row(case=case, system="poros-resident")
    yield Row(case=case, system="check", plan=HOST)


def _residents(rows: Sequence[Row]) -> Iterator[Row]:
    """One resident row per case and numerics: the compute floor."""
    seen = set()
    for row in rows:
        key = (row.case.name, row.blocks)
        if key not in seen:
            seen.add(key)
            plan = {"workspace": True} if row.plan.get("workspace") else {}
            yield Row(case=row.case, system="poros-resident", blocks=row.blocks, plan=plan)


def _checks(rows: Sequence[Row]) -> Iterator[Row]:
    """The residency gate of every streamed row; eager blocks against an oracle without graphs too."""
    for row in rows:
        for graphs in (True, False) if row.blocks == "eager" else (True,):
            label = "-".join(part for part in (row.label, "" if graphs else "no-graphs-oracle") if part)
            yield Row(
                case=row.case,
                system="check",
                blocks=row.blocks,
                plan=row.plan,
                label=label,
                oracle_graphs=graphs,
            )


def _planned_checks(rows: Sequence[Row]) -> Iterator[Row]:
    """The residency gate of every planned row: the plan with graphs against the resident run, eager blocks without.

    The oracle must fit the card, so its budget is not enforced here.
    """
    for row in rows:
        yield replace(row, system="check", oracle_graphs=row.blocks == "compiled", target_seconds=None)


# What a peer documents as faster or smaller, at the steps where it could matter.
PEER_VARIANTS: Mapping[str, tuple[str, Mapping[str, Any], tuple[str, ...]]] = {
    "unsloth": ("plain-checkpointing", {"gradient_checkpointing": True}, ("512", "8x512")),
    "soup": ("scale-cache", {"nf4_scale_cache": True}, ("512", "8x512")),
}


def _peers(system: str) -> Iterator[Row]:
    for shape in ("7b", "32b"):
        steps = _steps(shape)
        for step in ("512", "2048", "8x512", "8mb"):
            yield Row(case=steps[step], system=system)
    if system in PEER_VARIANTS:
        label, settings, names = PEER_VARIANTS[system]
        for shape in ("7b", "32b"):
            for step in names:
                yield Row(case=_steps(shape)[step], system=system, label=label, settings=settings)


def _frontier() -> Iterator[Row]:
    """More settings of every system, so that each budget finds its best one."""
    for shape in ("7b", "32b"):
        steps = _steps(shape)
        for step in ("2x512", "4x512", "16x512"):
            yield Row(case=steps[step], system="poros-streamed", blocks="compiled", plan=WORKSPACE)
            for peer in PEERS:
                yield Row(case=steps[step], system=peer)


def _budgets() -> Iterator[Row]:
    """Step time against the budget: ever more blocks stay resident."""
    for shape, counts in {"7b": (7, 14, 21), "32b": (16, 32, 48)}.items():
        for count in counts:
            yield Row(
                case=_steps(shape)["512"],
                system="poros-streamed",
                plan={"resident_blocks": count},
                label=f"{count}-resident",
            )


def _ablation() -> Iterator[Row]:
    """What each of copies, dequantization and launches costs: removed alone, launch by launch and with graphs.

    Eager launches are slow, so the large shape is cut to a quarter of its depth.
    """
    for shape, num_blocks in (("7b", None), ("32b", 16)):
        yield from _ablation_of(_steps(shape)["8mb"], num_blocks)


def _ablation_of(case: Case, num_blocks: int | None) -> Iterator[Row]:
    for graphs in (True, False):
        label = f"ablation-{'graphs' if graphs else 'launches'}"
        plan = {"workspace": True, "graphs": graphs}
        common: dict[str, Any] = {"case": case, "num_blocks": num_blocks}
        yield Row(system="poros-streamed", plan=plan, label=label, **common)
        yield Row(system="poros-resident", plan=plan, label=label, **common)
        yield Row(
            system="poros-streamed",
            plan=plan,
            label=f"{label}-stale",
            without="dequantization",
            **common,
        )


def _tiny() -> Iterator[Row]:
    """A few seconds on a CPU: keeps the bench itself from rotting."""
    case = Case(name="tiny-2mb", shape=TINY, micro_batches=2, tokens=16)
    yield Row(case=case, system="poros-streamed", plan={"num_slots": 2}, target_seconds=60.0)
    yield Row(case=case, system="check", plan={"residency": "streamed"}, planned=True)
    yield Row(case=case, system="peft")


def _tiny_peers() -> Iterator[Row]:
    """What a peer's script can show without a GPU; not in CI, because its packages are not installed there."""
    case = Case(name="tiny-2mb", shape=TINY, micro_batches=2, tokens=16)
    for peer in PEERS:
        yield Row(case=case, system=peer)


def _tiny_ablation() -> Iterator[Row]:
    return _ablation_of(Case(name="tiny-2mb", shape=TINY, micro_batches=2, tokens=16), None)


def groups() -> dict[str, tuple[Row, ...]]:
    """Return every list of rows by name. Rows are in the order in which they are worth their device time."""
    targets = tuple(_targets())
    return {
        "targets": targets,
        "planned": tuple(_planned(targets)),
        "resident": tuple(_residents(targets)),
        "checks": tuple(_checks(targets)),
        "planned-checks": tuple(_planned_checks(tuple(_planned(targets)))),
        "large-budgets": tuple(_large_budgets()),
        "bf16": tuple(_bf16()),
        **{peer: tuple(_peers(peer)) for peer in PEERS},
        "frontier": tuple(_frontier()),
        "budgets": tuple(_budgets()),
        "ablation": tuple(_ablation()),
        "tiny": tuple(_tiny()),
        "tiny-peers": tuple(_tiny_peers()),
        "tiny-ablation": tuple(_tiny_ablation()),
    }


def choose(patterns: Sequence[str]) -> list[Row]:
    """Return the rows of the named groups, or whose names match a pattern, each once.

    A pattern may be ``GROUP:PATTERN``: the rows of a group that match.
    """
    known = groups()
    chosen: dict[str, Row] = {}
    for pattern in patterns:
        group, _, inner = pattern.partition(":")
        if group in known:
            found = [row for row in known[group] if fnmatch(row.name, inner or "*")]
        else:
            found = [row for rows in known.values() for row in rows if fnmatch(row.name, pattern)]
        if not found:
            raise SystemExit(f"`{pattern}` names no row: expected a group ({', '.join(known)}) or a pattern")
        chosen |= {row.name: row for row in found if row.name not in chosen}
    return list(chosen.values())
