"""Products whose values no backward reads: a recompute leaves them out, and every gradient keeps its bits.

The last product of most decoder layers only enters a residual sum, whose gradient needs no value. It is nearly a third
of such a layer's recompute. Which products these are is found by following values through the block's own operations,
never by names.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from poros.adapters import lora_layers
from poros.blocks.frozen_linear import FrozenLinear
from poros.blocks.kinds import BlockKind, block_constants
from poros.engine.fake_visit import fake_visit
from poros.model import MetaModel

__all__ = ["unread_products"]

# Which values are read does not depend on the shape; what is shorter than any window or chunk is fastest.
BATCH, TOKENS = 1, 8
# Of an error, enough to see what a block does.
MAX_CAUSE = 200


def unread_products(meta: MetaModel, kind: BlockKind) -> frozenset[str]:
    """Return the paths of the frozen linear layers, as the checkpoint names them, that a recompute may leave out.

    Neither the layer's output nor anything that was computed from it is kept for backward. Where a block does what
    cannot be followed without values, nothing is left out, and a warning says so once.
    """
    config = meta.config.to_json_string(use_diff=False)
    constants = block_constants(kind.prototype)
    key = (
        type(meta.architecture),
        config,
        kind.layer_type,
        kind.layout,
        kind.adapter,
        kind.states,
        constants,
    )
    if key not in _found:
        _found[key] = _find(meta, kind)
    return _found[key]


# Paths by everything that a block is built from. A few per model: nothing is ever dropped.
_found: dict[Hashable, frozenset[str]] = {}


def _find(meta: MetaModel, kind: BlockKind) -> frozenset[str]:
    dtypes = {m.compute_dtype for m in kind.prototype.modules() if isinstance(m, FrozenLinear)}
    if not dtypes:
        return frozenset()
    (dtype,) = dtypes
    try:
        # In inference mode nothing is kept, and everything would seem to be unread.
        with torch.inference_mode(False):
            return _follow(meta, kind, dtype)
    except Exception as error:  # a block's own code fails on values that are not there in any way
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_CAUSE]
        warnings.warn(
            "A recompute makes every product again: which ones no gradient reads cannot be found without values "
            f"({cause}). Slower, the same bits.",
            RuntimeWarning,
            stacklevel=2,
        )
        return frozenset()


def _follow(meta: MetaModel, kind: BlockKind, dtype: torch.dtype) -> frozenset[str]:
    with fake_visit(meta, kind, dtype, batch=BATCH, tokens=TOKENS) as visit:
        products = _products(visit.template.module)
        values = _Values()
        hooks = [
            module.register_forward_hook(lambda _module, _args, output, path=path: values.begin(path, output))
            for path, module in products.items()
        ]
        try:
            with values, saved_tensors_hooks(values.read, lambda saved: saved):
                recorded = visit.template.record(
                    visit.hidden, visit.context, visit.states, [spec.name for spec in kind.states.reads]
                )
        finally:
            for hook in hooks:
                hook.remove()
        values.read_in_graph([recorded.output, *recorded.written.values()])
    return frozenset(values.begun) - values.were_read


def _products(block: nn.Module) -> Mapping[str, nn.Module]:
    """Return what computes each frozen linear layer's output: itself, or the LoRA layer around it."""
    found: dict[str, nn.Module] = dict(lora_layers(block))
    for path, module in block.named_modules():
        if isinstance(module, FrozenLinear) and path.removesuffix(".base_layer") not in found:
            found[path] = module
    return found


class _Values(TorchDispatchMode):
    """Follows the values of products from operation to operation, by the memory that they are written to.

    Attributes:
        begun: paths of the products that were seen. A layer that another shape or mode calls, or that is called past
            its hooks, is not among them.
        were_read: paths of the products of which something was kept for backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begun: set[str] = set()
        self.were_read: set[str] = set()
        self._held: dict[int, tuple[StorageWeakRef, frozenset[str]]] = {}

    def begin(self, path: str, output: torch.Tensor) -> None:
        """Follow the output of a product."""
        self.begun.add(path)
        self._mark([output], frozenset([path]))

    def read(self, saved: torch.Tensor) -> torch.Tensor:
        """Note what autograd keeps."""
        self.were_read |= self._products_in([saved])
        return saved

    def read_in_graph(self, outputs: Iterable[torch.Tensor]) -> None:
        """Note what the functions behind ``outputs`` keep beside autograd, as attributes of their contexts."""
        nodes = [output.grad_fn for output in outputs]
        seen = set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            self.were_read |= self._products_in(_tensors(getattr(node, "__dict__", {})))
            nodes += [function for function, _ in node.next_functions]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        inside = self._products_in(_tensors((args, kwargs)))
        output = func(*args, **(kwargs or {}))
        if inside:
            if self._is_covered():
                self.were_read |= inside
            self._mark(_tensors((args, kwargs)) if func._schema.is_mutable else (), inside)
            self._mark(_tensors(output), inside)
        return output

    def _is_covered(self) -> bool:
        """Whether hooks of the block's own, an offload's or a checkpoint's, take what autograd keeps right now."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return hooks is None or hooks[0] != self.read

    def _products_in(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        found = (self._held.get(tensor.untyped_storage()._cdata) for tensor in tensors)
        return frozenset().union(*(names for ref, names in filter(None, found) if not ref.expired()))

    def _mark(self, tensors: Iterable[torch.Tensor], names: frozenset[str]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            held = self._held.get(storage._cdata)
            before = held[1] if held is not None and not held[0].expired() else frozenset()
            self._held[storage._cdata] = (StorageWeakRef(storage), before | names)


def _tensors(values: object) -> list[torch.Tensor]:
    return [value for value in tree_iter(values) if isinstance(value, torch.Tensor)]
