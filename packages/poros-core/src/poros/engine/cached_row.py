"""One row that grows by tokens: keys, values and recurrent states stay on the device while blocks come and go.

Shape letters: T new tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poros.blocks.kinds import INDEX_ATTRIBUTE
from poros.decoder import cache_keyword
from poros.engine.embedding import check_token_ids
from poros.engine.engine import Engine
from poros.engine.targets import IGNORE_INDEX
from poros.engine.template import BlockTemplate
from poros.interfaces import BlockContext

if TYPE_CHECKING:
    from transformers import Cache

__all__ = ["CachedRow", "supports_cache"]


def supports_cache(engine: Engine) -> bool:
    """Say whether the engine's blocks can run behind a cache.

    Not where they are compiled, without an argument for a cache, or where the architecture makes no context for it.
    """
    return engine.model.numerics.blocks == "eager" and CachedRow(engine).context(1) is not None


class _Ids:
    """A micro-batch without labels, for the check of its ids."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.input_ids = torch.tensor([list(ids)])
        self.labels = torch.full_like(self.input_ids, IGNORE_INDEX)


class CachedRow:
    """The positions of one row so far.

    Attributes:
        length: how many positions the cache holds.

    Args:
        engine: a loaded engine that `supports_cache`.
    """

    def __init__(self, engine: Engine) -> None:
        from transformers import DynamicCache

        self._engine = engine
        self._cache: Cache = DynamicCache(config=engine.model.config)
        self.length = 0

    def context(self, tokens: int) -> BlockContext | None:
        """Return masks and rotary tables of the next ``tokens`` positions."""
        model = self._engine.model
        return model.architecture.cached_context(
            model.meta.module,
            past=self.length,
            tokens=tokens,
            cache=self._cache,
            device=model.device,
            dtype=model.numerics.compute_dtype,
        )

    @torch.no_grad()
    def append(self, ids: Sequence[int]) -> torch.Tensor:
        """Run T new tokens through the model and return the float32 (1, V) logits after the last one.

        Raises:
            UserError: a token is not in the vocabulary.
        """
        engine, model = self._engine, self._engine.model
        check_token_ids(_Ids(ids), model.num_tokens)
        context = self.context(len(ids))
        assert context is not None
        for table in model.token_tables:
            table.begin(len(ids))
        row = torch.tensor([list(ids)])
        hidden = model.embedding.rows(row)
        inputs = None if model.per_block is None else model.per_block.inputs(row, hidden)
        states: dict[str, torch.Tensor] = {}
        chunks: list[torch.Tensor] = []

        def block(index: int, template: BlockTemplate) -> None:
            nonlocal hidden
            if inputs is not None and model.per_block is not None:
                states[model.per_block.declared.spec.name] = inputs[:, :, index]
            with _caching(template.module, index, self._cache):
                hidden, written = template.forward(hidden, context, states)
            states.update(written)

        def head(_: int, weight: torch.Tensor) -> None:
            normed = model.head.norm(hidden[0, -1:]).to(model.numerics.compute_dtype)
            chunks.append(model.head.chunk_logits(normed, weight))

        engine.visit_blocks(block, head)
        self.length += len(ids)
        return torch.cat(chunks, dim=-1) if chunks else model.head.logits(hidden[0, -1:])


@contextlib.contextmanager
def _caching(module: nn.Module, index: int, cache: Any) -> Iterator[None]:
    """Let a template's layer be block ``index`` and find the cache among its arguments.

    Its own index is that of the block that its kind was first seen in, and `Architecture.call_block` knows no cache.
    """
    numbered = [part for part in module.modules() if hasattr(part, INDEX_ATTRIBUTE)]
    own = [getattr(part, INDEX_ATTRIBUTE) for part in numbered]
    for part in numbered:
        setattr(part, INDEX_ATTRIBUTE, index)
    forward, keyword = module.forward, cache_keyword(module.forward)
    # Also where `call_block` says that there is none: a cache that is not read would change every token in silence.
    call = functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **{**kwargs, keyword: cache}))
    module.forward = call
    try:
        yield
    finally:
        del module.forward
        for part, value in zip(numbered, own, strict=True):
            setattr(part, INDEX_ATTRIBUTE, value)
