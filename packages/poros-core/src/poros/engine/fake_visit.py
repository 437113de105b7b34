"""A visit on tensors that have shapes and no bytes: what a block does can be watched without memory or a device.

Shape letters: B batch, T tokens, D hidden size.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from poros.bank import StaticRegion
from poros.blocks.kinds import BlockKind
from poros.engine.packed import PackedContext
from poros.engine.template import BlockTemplate
from poros.engine.workspace import Workspace
from poros.interfaces import BlockContext
from poros.model import MetaModel

__all__ = ["FakeVisit", "fake_visit"]


@dataclass(frozen=True, slots=True)
class FakeVisit:
    """What a visit of one micro-batch works on.

    Attributes:
        template: bound to a buffer without bytes.
        hidden: (B, T, D) the block's input.
        context: of the shape.
        states: by name, all that the block reads and writes.
    """

    template: BlockTemplate
    hidden: torch.Tensor
    context: BlockContext
    states: Mapping[str, torch.Tensor]


@contextlib.contextmanager
def fake_visit(
    meta: MetaModel,
    kind: BlockKind,
    compute_dtype: torch.dtype,
    *,
    batch: int,
    tokens: int,
    packed: bool = False,
) -> Iterator[FakeVisit]:
    """Yield a visit of a (B, T) micro-batch in an eager block; operations inside make fake tensors.

    Everything runs as on a CPU: autograd would look for the queue of a device that may not be here.
    """
    _start_autograd()
    cpu = torch.device("cpu")
    # Transformers takes fake tensors for a trace and never leaves a mask out.
    shapes = meta.architecture.context(
        meta.module, batch=batch, tokens=tokens, device=cpu, dtype=compute_dtype
    )
    if packed:
        shapes = PackedContext(shapes, batch).context
    with meta.architecture.torch_kernels(), FakeTensorMode(allow_non_fake_inputs=True):
        template = BlockTemplate(
            kind,
            torch.empty(kind.layout.num_bytes, dtype=torch.uint8, device=cpu),
            StaticRegion([kind.adapter], cpu, compute_dtype),
            meta.architecture,
            compute_dtype,
            Workspace([kind], compute_dtype, cpu, per_visit=True),
            shared=(meta.module.config,),
        )
        inputs = [] if meta.per_block_inputs is None else [meta.per_block_inputs.spec]
        yield FakeVisit(
            template,
            torch.empty(batch, tokens, int(meta.config.hidden_size), dtype=compute_dtype, device=cpu),
            BlockContext(**{f.name: _like(getattr(shapes, f.name)) for f in fields(shapes)}),
            {
                spec.name: torch.empty(batch, tokens, *spec.sizes, dtype=compute_dtype, device=cpu)
                for spec in (*kind.states.reads, *kind.states.writes, *inputs)
            },
        )


@functools.cache
def _start_autograd() -> None:
    """Run autograd once before fake tensors come.

    They announce a CUDA device where there is none. An autograd that starts after that starts a thread for it, and a
    process with such a thread cannot be forked any more.
    """
    with torch.enable_grad(), torch.inference_mode(False):
        one = torch.ones((), device="cpu", requires_grad=True)
        torch.autograd.grad(one * 1, one)


def _like(value: Any) -> Any:
    """Return mappings and tuples of tensors as they are, with new tensors of the current mode on the CPU."""
    return tree_map_only(torch.Tensor, lambda t: torch.empty_like(t, device="cpu"), value)
