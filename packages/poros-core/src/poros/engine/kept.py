"""Forwards that autograd keeps until their backward, so that nothing is recomputed: time for device memory.

The tape reads a block's stored weights, dequantized matrices and adapters where they were when it was recorded. Blocks
in device memory never leave their place, and the backward visit puts the same matrices and adapters back where the
forward visit had them, so it reads the same values. A block in a slot has no such place: it is always recomputed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch

from poros.engine.static_states import StaticState
from poros.engine.template import BlockTemplate, Recorded

__all__ = ["KeptVisits", "highest"]


def highest(blocks: frozenset[int], count: int) -> frozenset[int]:
    """Return the ``count`` highest of the ``blocks``; more than there are is all of them."""
    return frozenset(sorted(blocks, reverse=True)[:count])


class KeptVisits:
    """The recorded forwards of one pass.

    A forward that is recorded must give the bits of one that is not, and its backward those of a recompute: before the
    first of every kind and shape is kept, both are compared. Kernels may be chosen by whether autograd records, and
    compiled ones fused differently; what is not equal is recomputed from then on, which is slower and the same bits.

    Args:
        blocks: whose forwards are kept; their bytes never move.
    """

    def __init__(self, blocks: frozenset[int]) -> None:
        self._blocks = blocks
        self._recorded: dict[tuple[int, int], Recorded] = {}
        self._equal: dict[Hashable, bool] = {}

    def begin_pass(self) -> None:
        """Forget what an aborted pass left."""
        self._recorded.clear()

    def keeps(self, block: int) -> bool:
        """Whether the forwards of ``block`` are asked to be kept."""
        return block in self._blocks

    def forward(
        self,
        template: BlockTemplate,
        block: int,
        micro_batch: int,
        static: StaticState,
        wanted: Sequence[str],
        seed: Callable[[], None],
    ) -> bool:
        """Run a forward visit and keep it; its results end in ``static``.

        Args:
            template: bound to the block, its matrices dequantized.
            block, micro_batch: of the visit.
            static: holds what the visit reads.
            wanted: states read whose gradients the backward visit will ask for.
            seed: sets the generator of the visit's dropout.

        Returns:
            False if nothing was done, because a recorded forward of this kind and shape has other bits.
        """
        key = id(template.kind), static.hidden.shape
        if not self._equal.get(key, True):
            return False
        writes = {spec.name for spec in static.specs.writes}
        reads = {name: value.clone() for name, value in static.states.items() if name not in writes}
        if key not in self._equal:
            self._equal[key] = _same(template, static, reads, wanted, seed)
            if not self._equal[key]:
                _warn(static.hidden.shape)
                return False
        seed()
        recorded = template.record(static.hidden.clone(), static.context, reads, wanted)
        static.hidden.copy_(recorded.output.detach())
        for name, value in recorded.written.items():
            static.states[name].copy_(value.detach())
        self._recorded[block, micro_batch] = recorded
        return True

    def pop(self, block: int, micro_batch: int) -> Recorded | None:
        """Return what the forward visit kept, and keep it no longer; None where the backward visit must recompute."""
        return self._recorded.pop((block, micro_batch), None)


def _same(
    template: BlockTemplate,
    static: StaticState,
    reads: Mapping[str, torch.Tensor],
    wanted: Sequence[str],
    seed: Callable[[], None],
) -> bool:
    """Compare a forward that is kept, and its backward, with a plain forward and a recompute."""
    seed()
    output, written = template.forward(static.hidden, static.context, reads)
    seed()
    kept = template.record(static.hidden, static.context, reads, wanted)
    if not torch.equal(kept.output, output) or not all(
        torch.equal(kept.written[name], value) for name, value in written.items()
    ):
        return False
    # Any gradient will do, as long as no two elements can trade places unseen.
    of_kept = template.gradients(kept, output, written)
    del kept
    seed()
    recomputed = template.record(static.hidden, static.context, reads, wanted, reads_output=False)
    of_recomputed = template.gradients(recomputed, output, written)
    return all(torch.equal(*pair) for pair in zip(of_kept, of_recomputed, strict=True))


def _warn(shape: torch.Size) -> None:
    batch, tokens, _ = shape
    warnings.warn(
        f"Blocks of {batch} x {tokens} tokens are recomputed in backward after all: a forward that keeps what backward "
        "needs gives other bits here. Slower, the same bits.",
        RuntimeWarning,
        stacklevel=2,
    )
