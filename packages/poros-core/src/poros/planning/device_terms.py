"""The terms of a run's peak in device memory.

Shape letters: B batch, T tokens, D hidden size, V vocabulary, L blocks.
"""

from __future__ import annotations

from poros.blocks.layout import align
from poros.blocks.placement import spread_evenly
from poros.engine.graphs import MAX_GRAPHS
from poros.engine.kept import highest
from poros.engine.loss import is_fused
from poros.engine.offload import NUM_RING_ROWS
from poros.engine.workspace import workspace_elements
from poros.planning.facts import ModelFacts
from poros.planning.shape import StepShape
from poros.planning.working_set import flash_accumulator_bytes
from poros.settings import Numerics, Plan

__all__ = [
    "BYTES_PER_GRAPH",
    "CONTEXT_BYTES",
    "PROCESS_TERMS",
    "device_terms",
    "head_chunk_bytes",
    "kept_blocks",
    "num_graphs",
    "num_slots",
]

FLOAT32_BYTES = 4
# A chunk of logits in float32, their exponentials, and both again in the compute dtype while the gradient is made.
# Fused: the logits themselves, which are overwritten.
LOSS_BYTES_PER_LOGIT = 12
# Per supervised position and hidden unit: gathered hidden states, normed ones and target rows in the compute dtype;
# the running sums and what the norm keeps for its backward in float32.
LOSS_ROWS, LOSS_FLOAT32_ROWS = 3, 2
# Once the vocabulary has gone by: the closed sums and the backward of the norm, in float32.
LOSS_CLOSING_ROWS = 3
# Weights and gradients of every adapter element.
ADAPTER_COPIES = 2
# Rotary tables, masks, targets and the allocator's rounding. With it, predictions of the eager engine lie between 0.98
# and 1.01 of what validation/receipts measured as allocated (one H200, torch 2.11, 2026-11-30).
SMALL_BYTES = 32 * 2**20
# Rows of the second token table and their projection, as they come and scaled; the norm of it in float32.
MIXING_ROWS, MIXING_FLOAT32_ROWS = 4, 3
# What Inductor's kernels hold at their peak over what eager ones hold: they save other intermediates for the backward.
# From 7B blocks on an H200 (torch 2.11, 2026-11-30): 1.51 GB against 1.26 with 8 x 512 tokens, and with one row of 2048
# 0.92 against 0.63, where the backward of attention makes the peak instead of the MLP's.
COMPILED_WORKING_SET = 1.2
# What compiled blocks leave for their backward over what eager ones leave. With 26 blocks of 7B kept, 8 x 512 tokens,
# all terms together were 21.69 GB at 0.56 and 20.34 GB were reserved (commit 30d2d1b, H200, torch 2.11): at most 0.505.
# The tensors that such a block keeps on a CPU give 0.46.
COMPILED_KEPT = 0.51
# A visit works on fixed addresses: the hidden states and their gradient (`poros.engine.static_states`).
STATIC_ROWS = 2
# ASSUMED, to be replaced by measurement: what the driver keeps per captured visit (some hundred kernels).
BYTES_PER_GRAPH = 1_500_000
# CUDA context with the modules of cuBLAS, flash attention and bitsandbytes: 0.80 to 0.825 GB on an H200.
CONTEXT_BYTES = 830_000_000
# CUBLAS_WORKSPACE_CONFIG=:4096:8 is 32 MiB per handle and stream; the capture stream has its own.
CUBLAS_WORKSPACE_BYTES = 2 * 32 * 2**20
# Peak reserved over peak allocated of runs with graphs is 1.03 to 1.04 on an H200; the rest is room for what the terms
# leave out.
RESERVED_OVER_ALLOCATED = 1.06

CONTEXT, WORKSPACES, ROUNDING = "CUDA context and modules", "cuBLAS workspaces", "allocator rounding"
# Terms that no tensor occupies.
PROCESS_TERMS = frozenset({CONTEXT, WORKSPACES, ROUNDING})
# Bytes of boolean masks per pair of positions where rows are packed: one per layer type (there are two at most), the
# causal one, and who stands in which sample.
MASKS_OF_PACKED_ROWS = 4


def device_terms(
    facts: ModelFacts, numerics: Numerics, plan: Plan, shape: StepShape, device_type: str
) -> dict[str, int]:
    """Return the terms of the peak by name, in bytes; see `poros.planning.prediction.predict`."""
    hidden_state = facts.hidden * facts.compute_bytes
    row = shape.positions_together(plan.order) * hidden_state
    region = max(kind.adapter_row for kind in facts.kinds) * FLOAT32_BYTES
    terms = _weights(facts, numerics, plan)
    terms["adapters, gradients, moments"] = (
        ADAPTER_COPIES * facts.adapter_elements * FLOAT32_BYTES + facts.moment_bytes + 2 * region
    )
    rows = NUM_RING_ROWS if plan.activations == "host" else facts.num_blocks + 1
    # The gradient that travels down is kept per micro-batch.
    terms["boundary activations"] = rows * row + shape.step_positions * hidden_state
    terms["visit inputs and outputs"] = shape.positions * (
        STATIC_ROWS * (hidden_state + facts.states_width * facts.compute_bytes)
        + facts.per_block_input_width * facts.compute_bytes
    )
    terms |= _state_terms(facts, shape.positions_together(plan.order))
    if plan.kept_blocks and not shape.packed:
        terms["kept activations"] = _kept_bytes(facts, numerics, plan, shape, device_type)
    elements = workspace_elements((kind.dequantized for kind in facts.kinds), per_visit=plan.workspace)
    terms["dequantized matrices"] = elements * facts.compute_bytes
    working = facts.working_set_bytes(shape.micro_batch_size, shape.tokens, device_type, shape.packed)
    if numerics.blocks == "compiled":
        working = int(working * COMPILED_WORKING_SET)
    if numerics.blocks == "compiled" and device_type == "cuda":
        working += flash_accumulator_bytes(
            shape.micro_batch_size,
            shape.tokens,
            heads=facts.num_heads,
            head_dim=max(kind.head_dim for kind in facts.kinds),
        )
    # Per-block inputs are made before block 0 runs.
    working = max(working, _mixing_bytes(facts, shape))
    loss = _loss_bytes(facts, numerics, plan, shape, device_type)
    if plan.graphs and device_type == "cuda":
        # The pool of captured graphs is never given back, so both exist side by side.
        terms["graph pool"] = working
        # The first pass of another shape runs without graphs, beside the pool.
        loss = max(loss, working if shape.num_shapes + shape.num_evaluation_shapes > 1 else 0)
        terms["captured graphs"] = num_graphs(facts, plan, shape) * BYTES_PER_GRAPH
        terms["loss chunk"] = loss
    elif loss > working:  # never alive together: the larger one makes the peak
        terms["loss chunk"] = loss
    else:
        terms["block working set"] = working
    masks = MASKS_OF_PACKED_ROWS * shape.positions * shape.tokens if shape.packed else 0
    terms["masks, tables"] = SMALL_BYTES + masks
    if device_type == "cuda":
        terms[ROUNDING] = int(sum(terms.values()) * (RESERVED_OVER_ALLOCATED - 1))
        terms[WORKSPACES] = CUBLAS_WORKSPACE_BYTES
        terms[CONTEXT] = CONTEXT_BYTES
    return terms


def kept_blocks(facts: ModelFacts, plan: Plan) -> frozenset[int]:
    """Return the blocks that are not recomputed."""
    count = facts.num_blocks if plan.residency == "resident" else plan.resident_blocks
    return highest(spread_evenly(count, facts.num_blocks), plan.kept_blocks)


def _kept_bytes(facts: ModelFacts, numerics: Numerics, plan: Plan, shape: StepShape, device_type: str) -> int:
    """What all micro-batches that are alive together leave in the kept blocks; no backward goes below the adapters."""
    kept = {block for block in kept_blocks(facts, plan) if block >= facts.lowest_adapted}
    per_kind = facts.kept_bytes(shape.micro_batch_size, shape.tokens, device_type)
    counts = [len(kept & set(kind.blocks)) for kind in facts.kinds]
    once = sum(count * size for count, size in zip(counts, per_kind, strict=True))
    if numerics.blocks == "compiled":
        once = int(once * COMPILED_KEPT)
    return once * (shape.num_micro_batches if plan.order == "block-major" else 1)


def num_graphs(facts: ModelFacts, plan: Plan, shape: StepShape) -> int:
    """Return how many graphs a run captures: per template, dequantization once, and every shape both ways.

    A template is a kind of block in one buffer: a slot, or a resident block's own.
    """
    resident = (
        facts.num_blocks if plan.residency == "resident" else min(plan.resident_blocks, facts.num_blocks)
    )
    streamed = num_slots(facts, plan) * len(facts.kinds) if resident < facts.num_blocks else 0
    per_template = 1 + 2 * shape.num_shapes + shape.num_evaluation_shapes
    return min(MAX_GRAPHS, (resident + streamed) * per_template)


def head_chunk_bytes(facts: ModelFacts, numerics: Numerics, plan: Plan) -> tuple[int, ...]:
    """Return the stored bytes of every streamed vocabulary chunk; none where the head is resident."""
    if plan.residency == "resident" or plan.head == "device":
        return ()
    size = numerics.loss_chunk_vocabulary
    starts = range(0, facts.vocabulary, size)
    row = facts.hidden * facts.storage_bytes
    return tuple(align(min(size, facts.vocabulary - start) * row) for start in starts)


def num_slots(facts: ModelFacts, plan: Plan, head_chunks: int = 0) -> int:
    """Return how many slots the engine makes: none where nothing is streamed, no more than there are things to hold."""
    if plan.residency == "resident" or (plan.resident_blocks >= facts.num_blocks and not head_chunks):
        return 0
    return min(plan.num_slots, max(2, facts.num_blocks + head_chunks))


def _state_terms(facts: ModelFacts, positions: int) -> dict[str, int]:
    """What accompanies the hidden states of every micro-batch that is alive; most families have nothing of the kind."""
    terms = {}
    if facts.states_width:
        width = facts.states_width + facts.gradients_width
        terms["states shared by blocks"] = positions * width * facts.compute_bytes
    if facts.per_block_width:
        terms["per-block inputs"] = positions * facts.per_block_width * facts.compute_bytes
    return terms


def _mixing_bytes(facts: ModelFacts, shape: StepShape) -> int:
    """Rows, their projection, the norm in float32 and what comes out."""
    width = MIXING_ROWS * facts.compute_bytes + MIXING_FLOAT32_ROWS * FLOAT32_BYTES
    return shape.positions * facts.per_block_width * width


def _weights(facts: ModelFacts, numerics: Numerics, plan: Plan) -> dict[str, int]:
    """Frozen weights: blocks, head, embedding and what else stands in front of the blocks."""
    terms = {}
    if facts.per_block_module_weights:
        terms["per-block input modules"] = facts.per_block_module_weights * facts.compute_bytes
    if plan.residency == "resident":
        terms |= {"resident blocks": facts.store_bytes, "head": facts.table_bytes}
        if not facts.tied:
            terms["embedding"] = facts.table_bytes
        if facts.per_block_table_bytes:
            terms["per-block table"] = facts.per_block_table_bytes
        return terms
    slot, chunks = facts.largest_block_bytes, head_chunk_bytes(facts, numerics, plan)
    if plan.head == "device":
        terms["head"] = facts.table_bytes
    else:
        slot = max(slot, *chunks)
    terms["slots"] = num_slots(facts, plan, len(chunks)) * slot
    resident = spread_evenly(plan.resident_blocks, facts.num_blocks)
    if resident:
        terms["resident blocks"] = sum(k.block_bytes * len(resident & set(k.blocks)) for k in facts.kinds)
    return terms


def _loss_bytes(facts: ModelFacts, numerics: Numerics, plan: Plan, shape: StepShape, device_type: str) -> int:
    """One chunk of logits, and the state of every micro-batch that runs along the vocabulary at the same time."""
    positions = min(numerics.loss_chunk_positions, shape.positions)
    vocabulary = min(numerics.loss_chunk_vocabulary, facts.vocabulary)
    fused = is_fused(numerics.blocks, device_type)
    chunk = positions * vocabulary * (facts.compute_bytes if fused else LOSS_BYTES_PER_LOGIT)
    if numerics.storage_dtype != numerics.compute_dtype:
        chunk += vocabulary * facts.hidden * facts.compute_bytes
    alive = shape.positions_together(plan.order) if plan.head == "host" else shape.positions
    state = alive * facts.hidden * (LOSS_FLOAT32_ROWS * FLOAT32_BYTES + LOSS_ROWS * facts.compute_bytes)
    closing = shape.positions * facts.hidden * LOSS_CLOSING_ROWS * FLOAT32_BYTES
    return max(chunk, closing) + state
