"""One compiled function per block kind: `torch.compile` of the layer as a function of its tensors.

Every template of a kind calls the same function with its own tensors, so a model costs one compilation per kind, shape
and mode instead of one per layer. Fused kernels round differently from eager ones: this is a numerics setting.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.func import functional_call

from poros.blocks.frozen_linear import FrozenLinear, reading_products, unread_product
from poros.blocks.kinds import BlockKind
from poros.errors import UserError, explain
from poros.interfaces import Architecture, BlockContext
from poros.precision import widened

__all__ = ["CompiledBlock"]

# Masks that Inductor draws by itself would differ between the forward and the recompute; nothing may be timed to choose
# a kernel, because two runs could choose differently.
OPTIONS: dict[str, Any] = {
    "fallback_random": True,
    "deterministic": True,
    # Every operation rounds as it does alone: bits must not depend on what it is fused with, which differs between a
    # forward that autograd records and one that it does not (`poros.engine.kept`).
    "emulate_precision_casts": True,
    "max_autotune": False,
    "coordinate_descent_tuning": False,
}
# Past dynamo's limit a call would silently run eagerly, with other bits.
MAX_COMPILATIONS = 1 << 20
# Of a compiler's message, enough to see what it misses.
MAX_CAUSE = 300


class CompiledBlock:
    """The layer of one kind as a compiled function of its tensors, its inputs and its context.

    Args:
        kind: what is compiled.
        architecture: how a block is called.
        compute_dtype: dtype of products.
        shared: objects that the copy of the prototype keeps by reference (the config).
        unread: paths of the frozen linear layers whose products backward does not read; see `unread_products`.
    """

    def __init__(
        self,
        kind: BlockKind,
        architecture: Architecture,
        compute_dtype: torch.dtype,
        shared: tuple[Any, ...],
        unread: Set[str],
    ) -> None:
        block = copy.deepcopy(kind.prototype, {id(value): value for value in shared})
        self._unread = []
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, FrozenLinear):
                    setattr(parent, name, _PlainLinear(child, compute_dtype))
        for path, module in block.named_modules():
            if isinstance(module, _PlainLinear) and path.removesuffix(".base_layer") in unread:
                self._unread.append(module)
        self._training: bool | None = None
        self._layer = _Layer(block, architecture, kind.layer_type)
        self._compute_dtype = compute_dtype
        # Float32 products are exact on purpose. Where a run turns warnings into errors, the hint would end it.
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores", category=UserWarning)
        # So does the tracer of torch 2.11, which makes an instance of every autograd function that it meets.
        warnings.filterwarnings("ignore", message=".*should not be instantiated", category=DeprecationWarning)
        torch._dynamo.config.recompile_limit = MAX_COMPILATIONS
        torch._dynamo.config.accumulated_recompile_limit = MAX_COMPILATIONS
        # By whether the output is read. Two functions, because the compiler tells them apart by their code: where there
        # is nothing to leave out, both would else share what was compiled first, cut for the one or the other.
        self._calls = {
            reads: torch.compile(function, fullgraph=True, dynamic=False, options=OPTIONS)
            for reads, function in ((True, self._functional), (False, self._recompute))
        }

    def _functional(
        self,
        tensors: Mapping[str, torch.Tensor],
        hidden: torch.Tensor,
        context: BlockContext,
        states: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        output: tuple[torch.Tensor, Mapping[str, torch.Tensor]] = functional_call(
            self._layer,
            {name: widened(tensor, self._compute_dtype) for name, tensor in tensors.items()},
            (hidden, context, states),
        )
        return output

    def _recompute(
        self,
        tensors: Mapping[str, torch.Tensor],
        hidden: torch.Tensor,
        context: BlockContext,
        states: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        return self._functional(tensors, hidden, context, states)

    def tensors(self, bound: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the arguments of a call from a template's tensors by the names of its own modules."""
        return {name: bound[_template_name(name)] for name, _ in _named_tensors(self._layer)}

    def set_training(self, training: bool) -> None:
        """Switch dropout on or off; every template of the kind asks for the same."""
        if training != self._training:
            self._training = training
            self._layer.train(training)

    def __call__(
        self,
        tensors: Mapping[str, torch.Tensor],
        hidden: torch.Tensor,
        context: BlockContext,
        states: Mapping[str, torch.Tensor],
        *,
        reads_output: bool,
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the block's (B, T, D) output and the states that it writes.

        Args:
            tensors: from `tensors`.
            hidden, context, states: see `BlockTemplate.call`.
            reads_output: see there; either is compiled by itself.

        Raises:
            UserError: the layer cannot be compiled on this machine.
        """
        try:
            with reading_products(self._unread, reads_output), _partition(keeps=reads_output):
                output: tuple[torch.Tensor, Mapping[str, torch.Tensor]] = self._calls[reads_output](
                    tensors, hidden, context, states
                )
        except torch._dynamo.exc.TorchDynamoException as error:
            cause = getattr(error, "inner_exception", error)  # what the compiler itself raised
            raise UserError(
                explain(
                    "Cannot compile a block",
                    expected="a layer that `torch.compile` can trace, and a working C compiler",
                    got=f"{type(cause).__name__}: {' '.join(str(cause).split())[:MAX_CAUSE]}",
                    where="numerics.blocks",
                    next_step="Use `blocks: eager`, or install a compiler (`apt install gcc`, python headers included)",
                )
            ) from error
        return output


def _partition(*, keeps: bool) -> contextlib.AbstractContextManager[Any]:
    """Return the setting under which a forward and its backward are cut apart, if this call compiles them.

    A forward whose output is read while autograd records is kept until its backward, beside those of other blocks. What
    products of the backward read then costs memory, and is made again from what is kept anyway if it can be: the
    product of an MLP's gate, a third of the MLP's tape. A recompute has its backward at once, and time counts.
    """
    return torch._functorch.config.patch(ban_recompute_materialized_backward=not keeps)


class _Layer(nn.Module):
    """What is compiled: the call of one block."""

    def __init__(self, block: nn.Module, architecture: Architecture, layer_type: str) -> None:
        super().__init__()
        self.block = block
        self._architecture = architecture
        self._layer_type = layer_type

    def forward(
        self, hidden: torch.Tensor, context: BlockContext, states: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        return self._architecture.call_block_with_states(
            self.block, hidden, context, self._layer_type, states
        )


class _PlainLinear(nn.Linear):
    """A frozen linear layer over a matrix that is already dequantized when the block is called."""

    def __init__(self, frozen: FrozenLinear, compute_dtype: torch.dtype) -> None:
        super().__init__(frozen.in_features, frozen.out_features, bias=frozen.has_bias, device="meta")
        self.requires_grad_(False)
        self._compute_dtype = compute_dtype
        self.reads_product = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self._compute_dtype)
        if not self.reads_product:
            product: torch.Tensor = _UnreadProduct.apply(x, self.weight)
            return product
        bias = None if self.bias is None else self.bias.to(self._compute_dtype)
        return F.linear(x, self.weight, bias)


class _UnreadProduct(torch.autograd.Function):
    """The gradient of a product without the product."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return unread_product(x, weight.shape[0])

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grads[0] @ weight, None


def _named_tensors(layer: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from layer.named_parameters()
    yield from layer.named_buffers()


def _template_name(name: str) -> str:
    """Templates know a frozen linear by its path in the checkpoint, PEFT's wrapper calls it ``base_layer``."""
    return name.removeprefix("block.").replace(".base_layer.", ".")
