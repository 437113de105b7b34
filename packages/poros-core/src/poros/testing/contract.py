"""Running every clause of the contract on one architecture and one tiny config."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from poros.determinism import configure
from poros.errors import PorosError
from poros.interfaces import Architecture, ParityCase
from poros.parity.gates import Oracles
from poros.plugins import Registry, load_registry
from poros.run.formats import make_weight_format
from poros.testing import block_calls, packing, saving, structure, training
from poros.testing.subject import CPU, ContractError, Subject, stock_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["CLAUSES", "ContractReport", "assert_contract", "check_contract"]

# What each clause of the contract demands, in the order in which they are examined.
CLAUSES: Mapping[str, str] = {
    "registration": "the plugin registers an architecture that serves the config and passes the gate",
    "parts": "blocks, embedding, norm and head lie where `parts` says; `build` takes no memory",
    "targets": "the default LoRA targets reach every block",
    "embedding": "rows times `embedding_scale` are the first block's input",
    "blocks": "`call_block` equals Transformers' model loop with difference 0.0, on full and on padded rows",
    "head": "norm, head and `logit_softcap` give Transformers' logits",
    "gradients": "every lora_B gets a gradient, and every lora_A once B has moved",
    "packing": "packed rows give the sum of their losses and gradients, where `packs_rows` says so",
    "repeatability": "the same run twice gives the same bytes",
    "controls": "an engine with a known fault turns the verdict, so the comparison can fail",
    "residency": "streamed equals resident byte for byte under every plan, in both orders",
    "restart": "a run saved half-way and continued under another plan equals the uninterrupted one",
    "adapter": "stock PEFT reads the saved adapter with 0 missing and 0 unexpected keys",
}


Check = Callable[[Subject, Oracles], None]

STAGES: tuple[Mapping[str, Check], ...] = (
    {"targets": structure.check_targets},
    {
        "embedding": block_calls.check_embedding,
        "blocks": block_calls.check_blocks,
        "head": block_calls.check_head,
    },
    {
        "gradients": training.check_gradients,
        "packing": packing.check_packing,
        "repeatability": training.check_repeatability,
    },
    {"controls": training.check_controls},
    {
        "residency": training.check_residency,
        "restart": training.check_restart,
        "adapter": saving.check_adapter,
    },
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ContractReport:
    """What was found, clause by clause.

    Attributes:
        architecture: registered name, or None where the plugin does not serve the config.
        held: clauses that hold, with the seconds each took.
        broken: clauses that do not, with the reason.
        not_examined: clauses that an earlier failure left open.
    """

    architecture: str | None
    held: Mapping[str, float]
    broken: Mapping[str, str]
    not_examined: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"Contract of architecture `{self.architecture}`:"]
        lines += [f"  {name}: holds ({seconds:.1f} s)" for name, seconds in self.held.items()]
        lines += [f"  {name}: BROKEN. {reason}" for name, reason in self.broken.items()]
        lines += [f"  {name}: not examined" for name in self.not_examined]
        return "\n".join(lines)


@dataclass(slots=True)
class _Examination:
    """The clauses examined so far."""

    held: dict[str, float] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)

    def examine(self, clause: str, check: Callable[[], Any]) -> Any:
        """Run one clause and return what it returned, None if it is broken."""
        start = time.perf_counter()
        try:
            result = check()
        except PorosError as error:
            self.broken[clause] = str(error)
        except Exception as error:  # a plugin's methods may fail in any way
            self.broken[clause] = f"`{type(error).__name__}` was raised: {' '.join(str(error).split())}"
        else:
            self.held[clause] = time.perf_counter() - start
            return result
        return None


def check_contract(plugin: Any, make_config: Callable[[], PreTrainedConfig]) -> ContractReport:
    """Examine the whole contract of `poros.interfaces.Architecture` on the CPU and report every clause.

    Clauses come in stages (what is registered, what blocks compute, what training does): where a stage is broken the
    next says nothing and is not examined.

    Args:
        plugin: the plugin's module, as its entry point names it; it need not be installed.
        make_config: builds a tiny config of one of its model types: four blocks or more, every layer type and branch
            that the family has, sizes of a few dozen, a sliding window of at most 64 tokens.
    """
    configure(CPU)
    installed = any(loaded.module is plugin for loaded in load_registry().plugins)
    registry = load_registry(() if installed else [("examined", "the plugin", plugin)])
    examination = _Examination()
    architecture = examination.examine(
        "registration", lambda: structure.check_registration(plugin, make_config(), registry)
    )
    subject = None
    if architecture is not None:
        subject = examination.examine("parts", lambda: _subject(architecture, make_config, registry))
    if subject is not None:
        oracles = Oracles(registry, CPU)
        for stage in STAGES:
            if examination.broken:
                break
            for clause, check in stage.items():
                examination.examine(clause, partial(check, subject, oracles))
    seen = {**examination.held, **examination.broken}
    return ContractReport(
        architecture=architecture.name if architecture is not None else None,
        held=examination.held,
        broken=examination.broken,
        not_examined=tuple(name for name in CLAUSES if name not in seen),
    )


def assert_contract(plugin: Any, make_config: Callable[[], PreTrainedConfig]) -> ContractReport:
    """Return `check_contract`'s report if every clause holds.

    Raises:
        ContractError: at least one clause is broken; each is named with what it expected and what it got.
    """
    report = check_contract(plugin, make_config)
    if report.broken:
        raise ContractError(str(report))
    return report


def _subject(
    architecture: Architecture, make_config: Callable[[], PreTrainedConfig], registry: Registry
) -> Subject:
    """Build the models of one architecture; its parts are checked."""
    text_config = make_config().get_text_config()
    built = architecture.build(text_config)
    subject = Subject(
        registry=registry,
        architecture=architecture,
        make_config=make_config,
        built=built,
        parts=architecture.parts(text_config),
        stock=stock_model(built),
        case=_case(architecture.name, make_config, registry),
    )
    structure.check_parts(subject)
    return subject


def _case(architecture: str, make_config: Callable[[], PreTrainedConfig], registry: Registry) -> ParityCase:
    """Return how the training clauses train: float32 products, where another order of sums shows."""
    make_weight_format("nf4", registry)  # says what to install where nothing brings it
    return ParityCase(
        name=f"contract-{architecture}",
        architecture=architecture,
        make_config=make_config,
        compute_dtype=torch.float32,
        row_lengths=((9, 4), (5,), (7,)),
        lora={"rank": 2},
        num_steps=2,
    )
