"""Clauses about what blocks compute: embedding, every block and the head against Transformers' own model loop.

Each block is called on the very input that Transformers gave it, so that a wrong one is named alone. Differences are
0.0, not small: both sides call the same modules.

Shape letters: B batch, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from poros.interfaces import BlockContext
from poros.parity.gates import Oracles
from poros.testing.subject import Subject, broken

__all__ = ["check_blocks", "check_embedding", "check_head"]

TOKENS = 12
NUM_PADDED = 5
# Rows must be longer than a sliding window for its mask to show; a tiny config has a tiny window.
MAX_WINDOW = 64
DATA_SEED = 17


@dataclass(slots=True)
class Recorded:
    """One forward pass of the stock model: what went into each block, what came out, and the logits."""

    input_ids: torch.Tensor
    logits: torch.Tensor
    inputs: list[torch.Tensor] = field(default_factory=list)
    arguments: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)


def record(subject: Subject, *, padded: bool) -> Recorded:
    """Run the stock model on two random rows; padded: the second row is shorter and a 2-D mask says so."""
    config = subject.text_config
    window = getattr(config, "sliding_window", None) or 0
    if window > MAX_WINDOW:
        raise broken(
            "The tiny config's window is too long to show",
            expected=f"at most {MAX_WINDOW} tokens",
            got=window,
            where="sliding_window",
        )
    tokens = max(TOKENS, window + NUM_PADDED + 3)
    generator = torch.Generator().manual_seed(DATA_SEED)
    ids = torch.randint(1, config.vocab_size, (2, tokens), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, -NUM_PADDED:] = 0
    seen = Recorded(ids, torch.empty(0))

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A clone: a block may work in place.
        seen.inputs.append((args[0] if args else kwargs["hidden_states"]).clone())
        seen.arguments.append(dict(kwargs))

    def after(_: Any, __: Any, output: Any) -> None:
        seen.outputs.append((output[0] if isinstance(output, tuple) else output).clone())

    handles = [
        h
        for b in subject.blocks
        for h in (b.register_forward_pre_hook(before, with_kwargs=True), b.register_forward_hook(after))
    ]
    try:
        with torch.no_grad():
            arguments = {"attention_mask": mask} if padded else {}
            seen.logits = subject.stock(input_ids=ids, use_cache=False, **arguments).logits
    finally:
        for handle in handles:
            handle.remove()
    return seen


def check_embedding(subject: Subject, _: Oracles) -> None:
    """Embedding rows times `Architecture.embedding_scale` are what the first block gets, in 32 and in 16 bits.

    A scale that is not rounded as Transformers rounds it shows in 16 bits alone.
    """
    for dtype in (torch.float32, torch.bfloat16):
        stock = copy.deepcopy(subject.stock).to(dtype)
        seen = record(replace(subject, stock=stock), padded=False)
        with torch.no_grad():
            table: Any = stock.get_submodule(subject.parts.embedding)
            rows = table.weight[seen.input_ids]
        scale = subject.architecture.embedding_scale(subject.text_config, dtype)
        ours = rows if scale is None else rows * scale
        if not torch.equal(ours, seen.inputs[0]):
            ratio = float((seen.inputs[0] / rows).flatten().median())
            raise broken(
                "`embedding_scale` is not what Transformers does",
                expected=f"a scale of about {ratio:.6g}",
                got="None" if scale is None else f"{float(scale):.6g}",
                where=f"input of block 0, {dtype}",
            )


def check_blocks(subject: Subject, _: Oracles) -> None:
    """`call_block` gives every block's output bit for bit, on full rows and on right-padded ones.

    Blocks that share states read what the plugin's own calls of earlier blocks wrote.
    """
    for padded in (False, True):
        seen = record(subject, padded=padded)
        batch, tokens = seen.input_ids.shape
        context = subject.architecture.context(
            subject.built, batch=batch, tokens=tokens, device=torch.device("cpu"), dtype=torch.float32
        )
        inputs = _per_block_inputs(subject, seen)
        states: dict[str, torch.Tensor] = {}
        for index, block in enumerate(subject.blocks):
            states |= {name: value[:, :, index] for name, value in inputs.items()}
            kind = subject.architecture.layer_type(subject.text_config, index)
            with torch.no_grad():
                ours, written = subject.architecture.call_block_with_states(
                    block, seen.inputs[index].clone(), context, kind, states
                )
            states.update(written)
            theirs = seen.outputs[index]
            if padded:  # nothing is promised about positions that hold no token
                ours, theirs = ours[:, :-NUM_PADDED], theirs[:, :-NUM_PADDED]
            if ours.shape != theirs.shape or not torch.equal(ours, theirs):
                rows = "padded" if padded else "full"
                raise broken(
                    f"`call_block` differs from Transformers' model loop, {rows} rows",
                    expected="a difference of 0.0",
                    got=_distance(ours, theirs),
                    where=f"block {index}, layer type `{kind}`{_why(seen.arguments[index], context, kind)}",
                )


def _per_block_inputs(subject: Subject, seen: Recorded) -> dict[str, torch.Tensor]:
    """Return the inputs that a second token table gives every block, (B, T, L, P), by the state's name."""
    declared = subject.architecture.per_block_inputs(subject.built)
    if declared is None:
        return {}
    table: Any = subject.stock.get_submodule(declared.table)
    modules = {path: subject.stock.get_submodule(path) for path in declared.modules}
    with torch.no_grad():
        rows = table.weight[seen.input_ids]
        if declared.scale is not None:
            rows = rows * torch.tensor(declared.scale, dtype=rows.dtype)
        mixed = subject.architecture.mix_per_block_inputs(subject.built, modules, seen.inputs[0], rows)
    return {declared.spec.name: mixed}


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    if ours.shape != theirs.shape:
        return f"shape {tuple(ours.shape)} against {tuple(theirs.shape)}"
    return f"{float((ours - theirs).abs().max()):.3g}"


def _why(arguments: dict[str, Any], context: BlockContext, kind: str) -> str:
    """Name the argument that differs from what Transformers gave this block, if one does."""
    theirs = arguments.get("attention_mask")
    if not _same(context.attention_masks.get(kind), theirs):
        return f": the attention mask differs{_fitting(context.attention_masks, theirs)}"
    tables = arguments.get("position_embeddings")
    if tables is not None and not _same(context.position_embeddings.get(kind), tables):
        return f": the rotary tables differ{_fitting(context.position_embeddings, tables)}"
    return ": mask and rotary tables are the same, so the call itself differs"


def _fitting(ours: Any, theirs: Any) -> str:
    fitting = [name for name, value in ours.items() if _same(value, theirs)]
    return f", those of layer type `{fitting[0]}` fit" if fitting else ""


def _same(ours: Any, theirs: Any) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    if isinstance(theirs, tuple):
        return isinstance(ours, tuple) and all(_same(a, b) for a, b in zip(ours, theirs, strict=True))
    return ours.shape == theirs.shape and torch.equal(ours, theirs)


def check_head(subject: Subject, _: Oracles) -> None:
    """Final norm, head and `Architecture.logit_softcap` give Transformers' logits from the last block's output."""
    seen = record(subject, padded=False)
    stock, parts = subject.stock, subject.parts
    with torch.no_grad():
        logits = stock.get_submodule(parts.head)(stock.get_submodule(parts.final_norm)(seen.outputs[-1]))
    cap = subject.architecture.logit_softcap(subject.text_config)
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    if not torch.equal(logits, seen.logits):
        raise broken(
            "Norm, head and `logit_softcap` do not give Transformers' logits",
            expected="a difference of 0.0",
            got=_distance(logits, seen.logits),
            where=f"final_norm `{parts.final_norm}`, head `{parts.head}`, logit_softcap {cap}",
        )
