"""Templates: one PEFT-injected decoder layer per (block kind, buffer), whose tensors are views of fixed addresses.

Nothing here allocates per block: the frozen tensors are views of the buffer that the template is bound to, the
adapters views of the static region. The two kernels, forward and recompute+backward, read and write only fixed
addresses and their arguments, so that each can be captured once per shape and replayed for every block of the kind.

Shape letters: B batch, T tokens, D hidden size.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from poros.adapters import ADAPTER, base_linears, lora_layers
from poros.bank import StaticRegion
from poros.blocks.frozen_linear import reading_products
from poros.blocks.kinds import BlockKind, plain_tensors
from poros.engine.compiled import CompiledBlock
from poros.engine.workspace import Workspace
from poros.interfaces import Architecture, BlockContext
from poros.precision import compute_region, widened

__all__ = ["BlockTemplate", "Recorded"]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A forward that autograd has recorded.

    Attributes:
        leaf: (B, T, D) the block's input.
        leaves: by name, the states read whose gradients are asked for.
        output: (B, T, D) the block's output.
        written: by name, the states that it wrote.
    """

    leaf: torch.Tensor
    leaves: Mapping[str, torch.Tensor]
    output: torch.Tensor
    written: Mapping[str, torch.Tensor]


class BlockTemplate:
    """A block kind bound to one buffer.

    Args:
        kind: what the buffer will hold.
        buffer: uint8 vector of at least the layout's bytes; a slot or a resident block.
        region: the static adapter region.
        architecture: how a block is called.
        compute_dtype: dtype of products and hidden states.
        workspace: where weights are dequantized; None allocates a matrix at every use.
        shared: objects that the copy of the prototype keeps by reference (the config).
        compiled: the kind's compiled function, or None to run its modules eagerly. It needs a workspace per visit.
        unread: paths of the frozen linear layers whose products backward does not read; see `unread_products`.
    """

    def __init__(
        self,
        kind: BlockKind,
        buffer: torch.Tensor,
        region: StaticRegion,
        architecture: Architecture,
        compute_dtype: torch.dtype,
        workspace: Workspace | None,
        shared: tuple[Any, ...],
        compiled: CompiledBlock | None = None,
        unread: Set[str] = frozenset(),
    ) -> None:
        self.kind = kind
        self._architecture = architecture
        self._compute_dtype = compute_dtype
        self._device = buffer.device
        self._buffer = buffer
        # Meta buffers need no copies either: the bound ones take their places.
        kept = (*shared, *kind.prototype.buffers())
        self.module = copy.deepcopy(kind.prototype, {id(value): value for value in kept})
        self._bind_frozen(workspace)
        self._region = region
        self._parameters = self._bind_adapters(region)
        self._unread = [linear for path, linear in self._linears if path in unread]
        self._lora = [layer for _, layer in lora_layers(self.module)]
        self._adapter_enabled = True
        self._head_dim = kind.head_dim
        self._training: bool | None = None
        self._compiled = compiled
        self._arguments = {} if compiled is None else compiled.tensors(self._named_tensors())

    def _named_tensors(self) -> dict[str, torch.Tensor]:
        """Return everything that a forward reads, frozen matrices as they are after `materialize`."""
        named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        for path, linear in self._linears:
            # Written once a visit with the same values: autograd must not count that as a change (`Kept`).
            named[f"{path}.weight"] = linear.matrix().data
            if linear.bias_view is not None:
                named[f"{path}.bias"] = linear.bias_view
        return named

    def _bind_frozen(self, workspace: Workspace | None) -> None:
        views = self.kind.layout.views(self._buffer)
        self._linears = list(base_linears(self.module))
        for path, linear in self._linears:
            prefix = f"{path}."
            linear.bind({n.removeprefix(prefix): view for n, view in views.items() if n.startswith(prefix)})
        if workspace is not None:
            workspace.bind(self._linears)
        self._plain: list[tuple[nn.Module, str]] = []
        for name, _ in plain_tensors(self.module):
            parent, _, leaf = name.rpartition(".")
            owner = self.module.get_submodule(parent)
            self._plain.append((owner, leaf))
            if leaf in owner._parameters:
                owner._parameters[leaf] = nn.Parameter(views[name], requires_grad=False)
            else:
                owner._buffers[leaf] = views[name]

    def _bind_adapters(self, region: StaticRegion) -> list[nn.Parameter]:
        parameters = []
        layers = dict(lora_layers(self.module))
        for tensor in self.kind.adapter.tensors:
            layer: Any = getattr(layers[tensor.path], tensor.group)[ADAPTER]
            # As above: a later visit of the same block loads the same values.
            layer.weight = nn.Parameter(region.weight(tensor).data)
            parameters.append(layer.weight)
        return parameters

    def adapter_parameters(self) -> list[nn.Parameter]:
        """Return the LoRA parameters in the order of the kind's signature; views of the static region."""
        return self._parameters

    def set_training(self, training: bool) -> None:
        """Switch dropout on or off. Walking the modules takes longer than launching a small visit."""
        if training == self._training:
            return
        self._training = training
        self.module.train(training)
        if self._compiled is not None:
            self._compiled.set_training(training)

    def set_adapter(self, *, enabled: bool, dropouts: Sequence[float]) -> None:
        """Switch the LoRA branches on or off, and set each layer's dropout, in module order, where they are on."""
        self._adapter_enabled = enabled
        for layer in self._lora:
            layer._disable_adapters = not enabled
        for layer, probability in zip(self._lora, dropouts, strict=False):
            dropout = layer.lora_dropout[ADAPTER]
            if isinstance(dropout, nn.Dropout):
                dropout.p = probability

    @property
    def has_workspace(self) -> bool:
        """Whether `materialize` has anything to do."""
        return any(linear.workspace is not None for _, linear in self._linears)

    def materialize(self) -> None:
        """Dequantize once for the whole visit where a workspace is bound."""
        for _, linear in self._linears:
            linear.materialize()

    def call(
        self,
        hidden: torch.Tensor,
        context: BlockContext,
        states: Mapping[str, torch.Tensor],
        *,
        reads_output: bool = True,
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Run the block under the run's precision policy, recording as autograd is set.

        Args:
            hidden: (B, T, D).
            states: by name, what else the block reads, (B, T, *sizes) each.
            reads_output: whether the results are read; otherwise products that backward does not read are left out,
                and what depends on them is NaN.

        Returns:
            The (B, T, D) output and what else the block writes.
        """
        layer_type = self.kind.layer_type
        masked = context.attention_masks[layer_type] is not None
        with compute_region(self._device, self._compute_dtype, masked=masked, head_dim=self._head_dim):
            if self._compiled is not None:
                return self._compiled(self._arguments, hidden, context, states, reads_output=reads_output)
            with self._widened_plain_tensors(), reading_products(self._unread, reads_output):
                return self._architecture.call_block_with_states(
                    self.module, hidden, context, layer_type, states
                )

    @contextlib.contextmanager
    def _widened_plain_tensors(self) -> Iterator[None]:
        """Let the layer read norms and the like in a wider compute dtype; see `poros.precision.widened`."""
        bound: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for owner, leaf in self._plain:
            held: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
            wide = widened(held[leaf].detach(), self._compute_dtype)
            if wide.dtype != held[leaf].dtype:
                bound.append((held, leaf, held[leaf]))
                held[leaf] = nn.Parameter(wide, requires_grad=False) if held is owner._parameters else wide
        try:
            yield
        finally:
            for held, leaf, tensor in bound:
                held[leaf] = tensor

    @torch.no_grad()
    def forward(
        self, hidden: torch.Tensor, context: BlockContext, states: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the block's (B, T, D) output and what else it writes; autograd remembers nothing of the slot."""
        return self.call(hidden, context, states)

    def backward(
        self,
        hidden: torch.Tensor,
        grad_output: torch.Tensor,
        context: BlockContext,
        states: Mapping[str, torch.Tensor],
        grad_states: Mapping[str, torch.Tensor],
        wanted: Sequence[str],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Recompute, backpropagate, add adapter gradients to the static region.

        Args:
            hidden: (B, T, D) the block's input.
            grad_output: (B, T, D) gradient of its output.
            states: what else it reads.
            grad_states: by name, the gradient of every state that it writes.
            wanted: names of the states read whose gradients are asked for.

        Returns:
            The (B, T, D) gradient of ``hidden``, and those of ``wanted`` by name.
        """
        recorded = self.record(hidden, context, states, wanted, reads_output=False)
        return self.backpropagate(recorded, grad_output, grad_states)

    def record(
        self,
        hidden: torch.Tensor,
        context: BlockContext,
        states: Mapping[str, torch.Tensor],
        wanted: Sequence[str],
        *,
        reads_output: bool = True,
    ) -> Recorded:
        """Run the block forward with autograd recording; see `backward` and `call` for the arguments.

        What is recorded reads the arguments' memory and this template's bound tensors again when it is backpropagated.
        """
        leaf = hidden.detach().requires_grad_()
        leaves = {name: states[name].detach().requires_grad_() for name in wanted}
        with torch.enable_grad():
            output, written = self.call(leaf, context, {**states, **leaves}, reads_output=reads_output)
        return Recorded(leaf, leaves, output, written)

    def backpropagate(
        self, recorded: Recorded, grad_output: torch.Tensor, grad_states: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Backpropagate through what `record` returned, once; see `backward`."""
        grads = self.gradients(recorded, grad_output, grad_states)
        leaves = recorded.leaves
        if self._adapter_enabled:
            self._region.add_gradients(self.kind.adapter, grads[1 + len(leaves) :])
        return grads[0], dict(zip(leaves, grads[1:], strict=False))

    def gradients(
        self, recorded: Recorded, grad_output: torch.Tensor, grad_states: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradients of a recorded forward's input, of its leaves and of the adapter's parameters, once."""
        names = [spec.name for spec in self.kind.states.writes]
        adapter = self._parameters if self._adapter_enabled else ()
        return torch.autograd.grad(
            [recorded.output, *(recorded.written[name] for name in names)],
            [recorded.leaf, *recorded.leaves.values(), *adapter],
            [grad_output, *(grad_states[name] for name in names)],
        )

    def assert_bound(self) -> None:
        """Assert that every frozen tensor still lies inside the buffer it was bound to.

        Libraries rebind parameters in their forwards; a template that reads elsewhere would train on stale bytes.
        """
        start = self._buffer.data_ptr()
        end = start + self._buffer.numel()
        bound = [view for _, linear in self._linears for view in linear.bound_tensors()]
        bound += [getattr(owner, leaf) for owner, leaf in self._plain]
        for tensor in bound:
            assert start <= tensor.data_ptr() < end, "a frozen tensor left its slot"
