"""The templates of an engine: one per (block kind, buffer), made when they are first asked for."""

from __future__ import annotations

from collections.abc import Iterator

from poros.bank import StaticRegion
from poros.blocks.kinds import BlockKind
from poros.blocks.slots import Slots
from poros.engine.compiled import CompiledBlock
from poros.engine.template import BlockTemplate
from poros.engine.unread import unread_products
from poros.engine.workspace import Workspace
from poros.model import LoadedModel

__all__ = ["Templates"]


class Templates:
    """Block templates by what they are bound to.

    Args:
        model: the loaded model.
        slots: the device slots, or None where nothing is streamed.
        region: the static adapter region.
        workspace: where matrices are dequantized.
    """

    def __init__(
        self, model: LoadedModel, slots: Slots | None, region: StaticRegion, workspace: Workspace
    ) -> None:
        self._model = model
        self._slots = slots
        self._region = region
        self._workspace = workspace
        self._kind_of = {block: kind for kind in model.kinds for block in kind.blocks}
        self._made: dict[tuple[int, int | None, int | None], BlockTemplate] = {}
        self._compiled: dict[int, CompiledBlock] = {}

    def __iter__(self) -> Iterator[BlockTemplate]:
        return iter(self._made.values())

    def get(self, block: int, slot: int | None, *, training: bool) -> BlockTemplate:
        """Return the template that visits ``block`` in ``slot``, or in its own buffer where the slot is None.

        Args:
            block: whose kind decides what the template is.
            slot: index of the slot that holds the block.
            training: dropout of a template that is made now.
        """
        kind = self._kind_of[block]
        key = (id(kind), slot, block if slot is None else None)
        template = self._made.get(key)
        if template is None:
            model = self._model
            template = BlockTemplate(
                kind,
                model.store.block(block) if slot is None else self._slots.buffers[slot],  # type: ignore[union-attr]
                self._region,
                model.architecture,
                model.numerics.compute_dtype,
                self._workspace,
                shared=(model.config,),
                compiled=self._compiled_block(kind) if model.numerics.blocks == "compiled" else None,
                unread=unread_products(model.meta, kind),
            )
            template.set_training(training)
            self._made[key] = template
        return template

    def _compiled_block(self, kind: BlockKind) -> CompiledBlock:
        """Return the compiled function of a kind; every template of the kind calls the same one."""
        if id(kind) not in self._compiled:
            model = self._model
            self._compiled[id(kind)] = CompiledBlock(
                kind,
                model.architecture,
                model.numerics.compute_dtype,
                shared=(model.config,),
                unread=unread_products(model.meta, kind),
            )
        return self._compiled[id(kind)]
