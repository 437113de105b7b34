"""What the parts of Poros hand to each other. No logic.

Shape letters: B batch, T tokens, D hidden size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedConfig

    from poros.blocks.frozen_linear import FrozenLinear
    from poros.plugins import Registry
    from poros.run import Reporter, Trainer

__all__ = [
    "Architecture",
    "BlockContext",
    "BlockStates",
    "MicroBatch",
    "ModelParts",
    "ParityCase",
    "PerBlockInputs",
    "RunAssembler",
    "StateSpec",
    "StepSource",
    "TensorSource",
    "TensorSpec",
    "WeightFormat",
]


@runtime_checkable
class MicroBatch(Protocol):
    """Rows that go through the model together. ``poros_data.Batch`` is one; any object with these will do.

    Attributes:
        input_ids: (B, T) int64 on the CPU, right-padded.
        labels: (B, T) int64 on the CPU, aligned with ``input_ids`` (position t holds the token at t, *not*
            shifted), -100 where the token is not supervised. Padding is -100 by position, never by id.

    A micro-batch whose rows hold several samples each also has ``position_ids``, (B, T) int64 on the CPU: they begin at
    0 again with every sample, and with the padding behind the last one. The architecture must say `packs_rows`.
    """

    @property
    def input_ids(self) -> torch.Tensor:
        """(B, T) token ids."""
        ...

    @property
    def labels(self) -> torch.Tensor:
        """(B, T) labels."""
        ...


@runtime_checkable
class StepSource(Protocol):
    """The micro-batches of every optimizer step as a pure function of the step's index.

    Random access makes the data position one integer, so that a resumed run reads exactly what the
    uninterrupted one would have read.
    """

    num_steps: int
    fingerprint: str

    def step(self, index: int) -> Sequence[MicroBatch]:
        """Return the micro-batches of optimizer step ``index`` (0-based, below ``num_steps``)."""
        ...


class RunAssembler(Protocol):
    """Makes a trainer from a run's config: opens the model, reads the rows, batches them. `poros.train` calls it."""

    def __call__(
        self,
        config: Any,
        registry: Registry,
        *,
        reporters: Sequence[Reporter],
        say: Callable[[str], None],
    ) -> Trainer:
        """Return a trainer that is ready to load.

        Args:
            config: what the user gave to `poros.train`.
            registry: the loaded plugins.
            reporters: receive the run's events.
            say: shows a line to the user.

        Raises:
            UserError: whatever is wrong with the user's input.
        """
        ...


@runtime_checkable
class TensorSource(Protocol):
    """Named tensors of a pretrained model, read one at a time.

    Attributes:
        fingerprint: changes whenever any byte of any tensor may have changed (file names, sizes, header hashes).
    """

    fingerprint: str

    def names(self) -> Sequence[str]:
        """Return every tensor name, in file order."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading its data."""
        ...

    def load(self, name: str, device: torch.device) -> torch.Tensor:
        """Read one tensor to ``device`` in its stored dtype. Raises `CheckpointError` if it is absent."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One frozen tensor inside a block: its name, dtype and shape. Size in bytes follows."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's data, without alignment."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


class WeightFormat(ABC):
    """How the frozen weight of a linear layer is stored, and how it becomes a matrix again.

    Attributes:
        name: what ``quantization:`` in a config names.
        claims_bitwise: the residency gate covers this format.
        experimental: a warning is printed when it is used.
    """

    name: ClassVar[str]
    claims_bitwise: ClassVar[bool]
    experimental: ClassVar[bool]

    @abstractmethod
    def specs(self, out_features: int, in_features: int) -> tuple[TensorSpec, ...]:
        """Return the tensors that one weight of this shape occupies, in order, without the linear's prefix."""

    @abstractmethod
    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Turn a (out_features, in_features) weight into the tensors of `specs`, on the weight's device.

        Raises `FormatError` where the weight's dtype cannot be stored in this format.
        """

    @abstractmethod
    def linear(
        self, in_features: int, out_features: int, *, bias: bool, compute_dtype: torch.dtype
    ) -> FrozenLinear:
        """Return an unbound linear layer of this format."""

    def fingerprint(self) -> str:
        """Return what a cached store depends on besides the source: name and library versions that set bits."""
        return self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParts:
    """Where the pieces of a built (meta) model live, as dotted module paths.

    ``head`` may be tied to ``embedding``: then the file holds no head tensor and the table occupies memory once.
    """

    blocks: str
    embedding: str
    final_norm: str
    head: str
    tied: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockContext:
    """Everything a block needs besides hidden states, for one micro-batch shape. Tensors on the device.

    Attributes:
        position_ids: (1, T) int64; (B, T) where rows are packed.
        position_embeddings: per layer type, the rotary (cos, sin) tables, (1, T, E) or (B, T, E) each.
        attention_masks: per layer type, a mask tensor or None (None lets SDPA use its causal path).
    """

    position_ids: torch.Tensor
    position_embeddings: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    attention_masks: Mapping[str, torch.Tensor | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpec:
    """A tensor that accompanies the hidden states of a micro-batch: (B, T, *sizes) in the compute dtype.

    Attributes:
        name: unique in the model, ``full_attention.key``.
        sizes: what follows (B, T): key/value heads and their size, for example.
    """

    name: str
    sizes: tuple[int, ...]

    @property
    def width(self) -> int:
        """Elements per position."""
        return math.prod(self.sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockStates:
    """What a block reads and hands on besides hidden states. Most families have nothing of the kind.

    Attributes:
        reads: states that an earlier block wrote. Their gradients flow back to that block.
        writes: states that later blocks read. Every name has one writer.
    """

    reads: tuple[StateSpec, ...] = ()
    writes: tuple[StateSpec, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PerBlockInputs:
    """A second token table, whose rows, mixed with the hidden states that enter block 0, are an input of every block.

    Shape letters: L blocks, P elements per position and block, V vocabulary. The input carries no gradient.

    Attributes:
        spec: name and sizes, (P,), of what one block reads.
        table: path of the (V, L * P) embedding. Like the first one it stays in host memory while blocks are streamed:
            rows are gathered there and copied.
        scale: factor of its rows, rounded to the compute dtype before it multiplies; None for none.
        modules: paths of the frozen modules that mix the rows in. They stay on the device in the compute dtype.
    """

    spec: StateSpec
    table: str
    scale: float | None
    modules: tuple[str, ...]


class Architecture(ABC):
    """One model family: how Transformers builds it, where its parts live and how a block is called.

    Attributes:
        name: unique name of the architecture in the registry.
        model_types: the ``model_type`` values of the configs that it serves.
        default_targets: leaf names of the linear layers that LoRA adapts unless the user says otherwise.
        ignored_tensors: regular expressions of file tensors that are known and not needed.
        packs_rows: samples that stand in one row do not see each other where masks and positions keep them apart:
            nothing but attention connects positions. A recurrent state or a convolution leaks.
    """

    name: ClassVar[str]
    model_types: ClassVar[tuple[str, ...]]
    default_targets: ClassVar[tuple[str, ...]]
    ignored_tensors: ClassVar[tuple[str, ...]] = ()
    packs_rows: ClassVar[bool] = False

    def text_config(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Return the text model's config: the nested one of a multimodal wrapper, else ``config`` itself.

        The other methods are given what this one returns, `check_config` excepted.
        """
        text: PreTrainedConfig = getattr(config, "text_config", None) or config
        return text

    @abstractmethod
    def check_config(self, config: PreTrainedConfig) -> None:
        """Raise `ArchitectureError` naming the feature if this config uses one that is not supported."""

    @abstractmethod
    def build(self, config: PreTrainedConfig) -> nn.Module:
        """Return the causal language model of Transformers on the meta device."""

    @abstractmethod
    def parts(self, config: PreTrainedConfig) -> ModelParts:
        """Return where the blocks, embedding, final norm and head live."""

    @abstractmethod
    def layer_type(self, config: PreTrainedConfig, block_index: int) -> str:
        """Return the key of `BlockContext` mappings for this block (``full_attention``, ...)."""

    @abstractmethod
    def context(
        self,
        model: nn.Module,
        *,
        batch: int,
        tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> BlockContext:
        """Build masks, position ids and rotary tables for one (B, T) shape of right-padded rows.

        ``model`` is what `build` returned: its config and classes say which masks and rotary tables apply.

        Right padding under a causal mask needs no padding mask: no real token attends to a later one, and padded
        positions carry no label.
        """

    def cached_context(
        self,
        model: nn.Module,
        *,
        past: int,
        tokens: int,
        cache: Cache,
        device: torch.device,
        dtype: torch.dtype,
    ) -> BlockContext | None:
        """Build the context of ``tokens`` new positions of one row behind ``past`` cached ones, to generate text.

        None, the default, means that every new token runs the whole row again. Otherwise `call_block` must reach the
        ``forward`` of Transformers' layer: the cache is added to its arguments.

        Args:
            cache: Transformers' cache of the row, which the layers fill.
        """
        return None

    @abstractmethod
    def call_block(
        self, block: nn.Module, hidden: torch.Tensor, context: BlockContext, layer_type: str
    ) -> torch.Tensor:
        """Run one decoder layer on (B, T, D) hidden states exactly as Transformers' model loop does."""

    def block_states(self, block: nn.Module) -> BlockStates:
        """Return what a built (meta) decoder layer reads and writes besides hidden states."""
        return BlockStates()

    def per_block_inputs(self, model: nn.Module) -> PerBlockInputs | None:
        """Return the second token table of a built (meta) model, or None."""
        return None

    def call_block_with_states(
        self,
        block: nn.Module,
        hidden: torch.Tensor,
        context: BlockContext,
        layer_type: str,
        states: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Run one decoder layer that reads or writes states; what the engine calls for every block.

        A family without states need not know of this: `call_block` is what its layers go through.

        Args:
            block: as in `call_block`.
            hidden: as in `call_block`.
            context: as in `call_block`.
            layer_type: as in `call_block`.
            states: by name, (B, T, *sizes) each: what `block_states` says the block reads, and its own per-block input.

        Returns:
            The (B, T, D) output, and by name what the block writes, (B, T, *sizes) each, on autograd's tape.
        """
        return self.call_block(block, hidden, context, layer_type), {}

    def mix_per_block_inputs(
        self, model: nn.Module, modules: Mapping[str, nn.Module], hidden: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Return the inputs of all blocks, (B, T, L, P); only called where `per_block_inputs` returns something.

        Args:
            model: what `build` returned, on the meta device.
            modules: the modules that `PerBlockInputs.modules` names, holding their weights.
            hidden: (B, T, D) hidden states that enter block 0.
            rows: (B, T, L * P) scaled rows of the second table, in the compute dtype.
        """
        raise NotImplementedError

    def ignored(self, config: PreTrainedConfig) -> tuple[str, ...]:
        """Return the patterns of `ignored_tensors` and what this config adds: tensors that nothing needs."""
        return self.ignored_tensors

    def embedding_scale(self, config: PreTrainedConfig, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the scalar that multiplies embedding rows of ``dtype``, 0-d and rounded to that dtype, or None."""
        return None

    def kernels(self) -> Mapping[str, str]:
        """Return which implementation runs, per function that an installed package may replace.

        Another implementation rounds differently: this is recorded with every run and receipt, and two runs that differ
        in it cannot be compared.
        """
        return {}

    def torch_kernels(self) -> AbstractContextManager[None]:
        """Let Transformers' own torch implementations of `kernels` run inside: tensors without bytes suit no others."""
        return nullcontext()

    def logit_softcap(self, config: PreTrainedConfig) -> float | None:
        """Return the final soft-capping value of the logits, or None."""
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityCase:
    """One gated comparison: a small model of one architecture and how it is trained.

    Attributes:
        name: unique, names the gate's test.
        architecture: registry name.
        make_config: builds the model's config (a callable, so that nothing is built at import).
        weight_format: registry name of the format.
        compute_dtype: dtype of products and activations.
        row_lengths: per micro-batch, the token counts of its rows (unequal on purpose).
        lora: keyword arguments of `poros.settings.LoraSettings`.
        num_steps: optimizer steps to compare.
        length_bucket, loss_chunk_positions, loss_chunk_vocabulary: numerics; small, so that tiny rows need padding and
            several chunks.
        blocks: ``eager`` or ``compiled``.
        neftune_alpha: see `poros.settings.Numerics`.
        optimizer: keyword arguments of `poros.settings.OptimizerSettings` that differ from the gates' usual ones.
        weight_factors: multiplies every random tensor whose name ends so, where a family's trained weights are far from
            the usual ones.
    """

    name: str
    architecture: str
    make_config: Callable[[], Any]
    weight_format: str = "nf4"
    compute_dtype: torch.dtype = torch.bfloat16
    row_lengths: tuple[tuple[int, ...], ...] = ((9, 4), (5,), (14, 3), (7,), (11, 12))
    lora: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({"rank": 4}))
    num_steps: int = 5
    length_bucket: int = 4
    loss_chunk_positions: int = 5
    loss_chunk_vocabulary: int = 24
    blocks: str = "eager"
    neftune_alpha: float = 0.0
    optimizer: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    weight_factors: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
