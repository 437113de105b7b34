"""Predicted bytes of a run, term by term, from the meta model alone.

Shape letters: B batch, T tokens, D hidden size, V vocabulary, L blocks, N query heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from poros.blocks.disk_ring import RING_BUFFERS
from poros.blocks.placement import place_blocks
from poros.blocks.slots import STAGING_BUFFERS
from poros.model import MetaModel
from poros.planning.device_terms import PROCESS_TERMS, device_terms
from poros.planning.facts import ModelFacts, model_facts
from poros.planning.shape import StepShape
from poros.settings import Numerics, Plan

__all__ = ["Prediction", "StepShape", "predict", "predict_from_facts"]

FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Predicted bytes by term.

    Attributes:
        device: terms of the peak in device memory, the whole process; on the CPU they are host memory too.
        host: terms in host memory besides the process itself.
        block_bytes: per kind, the bytes of one block, in the kinds' order.
        store_bytes: bytes of all blocks.
    """

    device: Mapping[str, int]
    host: Mapping[str, int]
    block_bytes: tuple[int, ...]
    store_bytes: int

    @property
    def device_bytes(self) -> int:
        """The predicted peak of device memory: context and everything that is reserved."""
        return sum(self.device.values())

    @property
    def allocated_bytes(self) -> int:
        """The predicted peak of what tensors occupy: no context, no library workspace, no fragmentation."""
        return sum(count for name, count in self.device.items() if name not in PROCESS_TERMS)

    @property
    def host_bytes(self) -> int:
        """The predicted peak of host memory, without the process itself."""
        return sum(self.host.values())


def predict(
    meta: MetaModel, *, numerics: Numerics, plan: Plan, shape: StepShape, device_type: str = "cuda"
) -> Prediction:
    """Predict where a run's bytes go. It is a prediction: the run reports what it measured.

    Args:
        meta: the model without weights.
        numerics, plan: settings of the run.
        shape: its largest optimizer step.
        device_type: decides the attention backend, whether there are graphs, and whether there is a context.
    """
    return predict_from_facts(model_facts(meta, numerics), numerics, plan, shape, device_type)


def predict_from_facts(
    facts: ModelFacts, numerics: Numerics, plan: Plan, shape: StepShape, device_type: str
) -> Prediction:
    """`predict` for a caller that asks often."""
    return Prediction(
        device=device_terms(facts, numerics, plan, shape, device_type),
        host=_host_terms(facts, plan, shape),
        block_bytes=tuple(kind.block_bytes for kind in facts.kinds),
        store_bytes=facts.store_bytes,
    )


def _host_terms(facts: ModelFacts, plan: Plan, shape: StepShape) -> dict[str, int]:
    terms = {}
    loading = facts.largest_linear * FLOAT32_BYTES
    if plan.residency == "streamed":
        resident, on_disk = place_blocks(plan, facts.num_blocks)
        elsewhere = resident | on_disk
        away = sum(kind.block_bytes * len(elsewhere & set(kind.blocks)) for kind in facts.kinds)
        terms["block store"] = facts.store_bytes - away
        if on_disk:
            largest = max(kind.block_bytes for kind in facts.kinds if on_disk & set(kind.blocks))
            terms["disk ring"] = RING_BUFFERS * largest
        terms["embedding"] = facts.table_bytes
        width = facts.hidden + facts.per_block_width
        terms["embedding rows"] = shape.step_positions * width * facts.storage_bytes
        if facts.per_block_table_bytes:
            terms["per-block table"] = facts.per_block_table_bytes
        if plan.head == "host":
            terms["head"] = facts.table_bytes
            if not facts.tied:
                loading = max(loading, facts.table_bytes)
        if not plan.pin_host_memory:
            terms["staging"] = STAGING_BUFFERS * facts.largest_block_bytes
    if plan.activations == "host":
        row = shape.positions_together(plan.order) * facts.hidden * facts.compute_bytes
        terms["boundary activations"] = facts.num_blocks * row
    terms["one matrix while loading"] = loading
    return terms
