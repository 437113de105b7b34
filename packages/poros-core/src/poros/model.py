"""A model ready to train: filled store, block kinds, adapter bank, embedding and head."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig
from torch import nn

from poros.adapters import (
    freeze_linears,
    initial_weights,
    inject,
    lora_layers,
    make_lora_config,
)
from poros.bank import AdapterBank
from poros.blocks.fill import BlockFiller, load_checked
from poros.blocks.kinds import BlockKind, classify_blocks
from poros.blocks.layout import BlockLayout, make_layout
from poros.blocks.placement import PlacedStore, place_blocks
from poros.blocks.store import BlockStore, DeviceStore
from poros.blocks.store_cache import StoreCache, store_key
from poros.engine.embedding import Embedding
from poros.engine.loss import LossHead, is_fused
from poros.engine.per_block import PerBlockTable
from poros.errors import ArchitectureError, ConfigError, PorosError, explain
from poros.interfaces import (
    Architecture,
    BlockContext,
    BlockStates,
    ModelParts,
    PerBlockInputs,
    StateSpec,
    TensorSource,
    TensorSpec,
    WeightFormat,
)
from poros.lora_targets import resolve_targets
from poros.settings import LoraSettings, Numerics, Plan
from poros.wrappers import tower_linears

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["LoadedModel", "MetaModel", "initial_bank", "load_ends", "load_model", "make_meta_model"]

Progress = Callable[[int, int], None]
Load = Callable[[str, torch.device], torch.Tensor]

NO_CACHE = explain(
    "Blocks cannot be streamed from the disk",
    expected="a folder for quantized stores",
    got="none",
    where="plan.disk_blocks",
    next_step="Set `cache_dir` to a folder on a fast disk, or `plan.disk_blocks` to 0",
)
# The one tensor of a vocabulary chunk in the store.
HEAD_ROWS = "rows"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MetaModel:
    """The model without weights: what can be said before a byte of the checkpoint is read.

    Attributes:
        config: the text model's.
        wrapper: the multimodal config that ``config`` is nested in, or None.
        module: Transformers' model on the meta device, linears frozen, LoRA injected.
        tensor_names: every tensor that the checkpoint must hold.
        targets: leaf names that LoRA adapts.
        state_writers: per name of a state, the block that writes it.
        per_block_inputs: the second token table, or None.
    """

    architecture: Architecture
    config: PreTrainedConfig
    wrapper: PreTrainedConfig | None
    parts: ModelParts
    module: nn.Module
    kinds: tuple[BlockKind, ...]
    lora_config: LoraConfig
    targets: tuple[str, ...]
    tensor_names: tuple[str, ...]
    state_writers: Mapping[str, int]
    per_block_inputs: PerBlockInputs | None

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder layers."""
        return self.module.get_submodule(self.parts.blocks)  # type: ignore[return-value]


def make_meta_model(
    *,
    architecture: Architecture,
    config: PreTrainedConfig,
    weight_format: WeightFormat,
    lora: LoraSettings,
    numerics: Numerics,
) -> MetaModel:
    """Build, freeze and inject the model on the meta device, and classify its blocks.

    Raises:
        ArchitectureError: the config uses an unsupported feature.
        ConfigError: a LoRA target matches nothing.
    """
    architecture.check_config(config)
    given, config = config, architecture.text_config(config)
    wrapper = given if given is not config else None
    module = _build(architecture, config)
    parts = architecture.parts(config)
    names = tuple(
        name for name in module.state_dict() if not (parts.tied and name.startswith(f"{parts.head}."))
    )
    blocks: nn.ModuleList = module.get_submodule(parts.blocks)  # type: ignore[assignment]
    targets = resolve_targets(
        module,
        parts,
        lora,
        architecture.default_targets,
        lambda: () if wrapper is None else tower_linears(wrapper, blocks[0]),
    )
    for block in blocks:
        freeze_linears(block, weight_format, numerics.compute_dtype)
    lora_config = make_lora_config(lora, targets, parts)
    inject(module, lora_config)
    layer_types = [architecture.layer_type(config, index) for index in range(len(blocks))]
    states = [architecture.block_states(block) for block in blocks]
    return MetaModel(
        architecture=architecture,
        config=config,
        wrapper=wrapper,
        parts=parts,
        module=module,
        kinds=classify_blocks(blocks, layer_types, weight_format, numerics.storage_dtype, states=states),
        lora_config=lora_config,
        targets=targets,
        tensor_names=names,
        state_writers=_state_writers(architecture, states),
        per_block_inputs=architecture.per_block_inputs(module),
    )


def _build(architecture: Architecture, config: PreTrainedConfig) -> nn.Module:
    """Build the model; layers check few of their values, and fail in ways of their own."""
    try:
        return architecture.build(config)
    except PorosError:
        raise
    except Exception as error:
        raise ArchitectureError(
            explain(
                f"Cannot build this `{config.model_type}` model",
                expected="values in config.json that Transformers' layers take",
                got=" ".join(f"{type(error).__name__}: {error}".split())[:300],
                where="config.json",
                next_step="Correct the value that is named, or download config.json again",
            )
        ) from error


def _state_writers(architecture: Architecture, states: Sequence[BlockStates]) -> dict[str, int]:
    """Return the block that writes each state."""
    writers: dict[str, int] = {}
    specs: dict[str, StateSpec] = {}
    read = set()
    fault = None
    for block, own in enumerate(states):
        for spec in own.reads:
            read.add(spec.name)
            if specs.get(spec.name) != spec:
                fault = f"block {block} reads {spec}, and no earlier block writes it"
        for spec in own.writes:
            if spec.name in writers:
                fault = f"blocks {writers[spec.name]} and {block} both write `{spec.name}`"
            writers[spec.name], specs[spec.name] = block, spec
    if unread := sorted(writers.keys() - read):
        # The writer's backward visit would wait for a gradient that nobody sends.
        fault = f"no block reads {unread}"
    if fault is not None:
        raise ArchitectureError(
            explain(
                f"Architecture `{architecture.name}` describes its blocks' states wrongly",
                expected="every state written by one block and read by later ones",
                got=fault,
                where="Architecture.block_states",
            )
        )
    return writers


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """Everything an `Engine` runs on.

    Attributes:
        store: every block; behind them the vocabulary chunks of a streamed head.
        resident: the blocks that live in device memory.
        per_block: the second token table of families whose every block reads an input of its own.
    """

    meta: MetaModel
    numerics: Numerics
    device: torch.device
    store: BlockStore
    resident: frozenset[int]
    bank: AdapterBank
    embedding: Embedding
    per_block: PerBlockTable | None
    head: LossHead

    @property
    def architecture(self) -> Architecture:
        """How blocks are called."""
        return self.meta.architecture

    @property
    def config(self) -> PreTrainedConfig:
        """The config object that the built modules share."""
        return self.meta.module.config

    @property
    def kinds(self) -> tuple[BlockKind, ...]:
        """Block kinds in order of first appearance."""
        return self.meta.kinds

    @property
    def num_blocks(self) -> int:
        """Decoder layers."""
        return len(self.meta.blocks)

    @property
    def hidden_size(self) -> int:
        """D of the hidden states."""
        return int(self.config.hidden_size)

    @property
    def token_tables(self) -> tuple[Embedding, ...]:
        """Everything that token ids look rows up in."""
        return (self.embedding,) if self.per_block is None else (self.embedding, self.per_block.embedding)

    @property
    def num_tokens(self) -> int:
        """Token ids below this one have rows in every table."""
        return min(table.num_tokens for table in self.token_tables)

    @property
    def num_streamed_head_chunks(self) -> int:
        """Vocabulary chunks behind the blocks of the store; 0 where the head is resident."""
        return len(self.store.layouts) - self.num_blocks

    def head_chunk(self, chunk: int, buffer: torch.Tensor) -> torch.Tensor:
        """Return the (C, D) head rows of a streamed vocabulary chunk that ``buffer`` holds. A view."""
        return self.store.layouts[self.num_blocks + chunk].views(buffer)[HEAD_ROWS]

    def make_context(self, batch: int, tokens: int) -> BlockContext:
        """Return masks and rotary tables of one (B, T) shape on the device."""
        return self.architecture.context(
            self.meta.module,
            batch=batch,
            tokens=tokens,
            device=self.device,
            dtype=self.numerics.compute_dtype,
        )

    def adapter_name(self, block: int, path: str, group: str) -> str:
        """Return PEFT's saved key of one LoRA tensor."""
        return f"base_model.model.{self.meta.parts.blocks}.{block}.{path}.{group}.weight"

    def adapter_tensors(self, buffers: Any = None) -> dict[str, torch.Tensor]:
        """Return every LoRA tensor by PEFT's saved key, as views of the bank (or of buffers shaped like it)."""
        chosen = self.bank.weights if buffers is None else buffers
        return {
            self.adapter_name(block, tensor.path, tensor.group): view
            for block, tensor, view in self.bank.tensors(chosen)
        }


def load_model(
    meta: MetaModel,
    *,
    source: TensorSource,
    weight_format: WeightFormat,
    numerics: Numerics,
    plan: Plan,
    device: torch.device,
    seed: int,
    progress: Progress | None = None,
    cache: StoreCache | None = None,
) -> LoadedModel:
    """Quantize the checkpoint tensor by tensor into the plan's store and initialize the adapters.

    Peak host memory is the host part of the finished store plus one block, two where blocks go to the disk;
    quantization runs on the training device.

    Args:
        meta: from `make_meta_model`.
        source: the checkpoint; its names must have been checked.
        weight_format: the same that ``meta`` was made with.
        seed: of the adapters' initial values.
        progress: called with (blocks done, blocks).
        cache: where a finished store of the same source, format and kind of device may lie, and where a new one goes.

    Raises:
        CheckpointError: a tensor is absent or has another shape than the config says.
        FormatError: a weight cannot be stored in the format.
        ConfigError: blocks are to be streamed from the disk, and there is no ``cache``.
        OutputError: they are, and the cache's folder cannot take the store.
    """
    blocks = meta.blocks
    kind_of = {block: kind for kind in meta.kinds for block in kind.blocks}
    layouts = [kind_of[index].layout for index in range(len(blocks))]
    is_resident = plan.residency == "resident"
    resident, on_disk = place_blocks(plan, len(blocks))
    if on_disk and cache is None:
        raise ConfigError(NO_CACHE)
    head_layouts = [] if is_resident or plan.head == "device" else _head_layouts(meta, numerics)
    store: BlockStore = (
        DeviceStore(layouts, device)
        if is_resident
        else PlacedStore(
            layouts + head_layouts,
            resident,
            device,
            pin=plan.pin_host_memory and device.type == "cuda",
            on_disk=on_disk,
        )
    )
    filler = BlockFiller(source, weight_format, numerics.storage_dtype, device)

    def make(index: int, target: torch.Tensor) -> None:
        filler.fill(blocks[index], f"{meta.parts.blocks}.{index}.", layouts[index], target)
        if progress is not None:
            progress(index + 1, len(blocks))

    key = store_key(source, weight_format, numerics.storage_dtype, device, layouts) if cache else None
    if cache is None or key is None or not cache.load(key, store, len(blocks)):
        if cache is not None and key is not None and isinstance(store, PlacedStore) and on_disk:
            cache.fill(key, store, len(blocks), make)
        else:
            for index in range(len(blocks)):
                make(index, store.block(index))
            if cache is not None and key is not None:
                cache.save(key, store, len(blocks))
    return LoadedModel(
        meta=meta,
        numerics=numerics,
        device=device,
        store=store,
        resident=resident,
        bank=initial_bank(meta, device, seed),
        **load_ends(meta, source, numerics, device, store, is_resident=is_resident),
    )


def _head_layouts(meta: MetaModel, numerics: Numerics) -> list[BlockLayout]:
    """Return one layout per vocabulary chunk of the head."""
    vocabulary, hidden = int(meta.config.vocab_size), int(meta.config.hidden_size)
    size = numerics.loss_chunk_vocabulary
    counts = [min(size, vocabulary - start) for start in range(0, vocabulary, size)]
    return [
        make_layout([TensorSpec(name=HEAD_ROWS, dtype=numerics.storage_dtype, shape=(count, hidden))])
        for count in counts
    ]


def initial_bank(meta: MetaModel, device: torch.device, seed: int) -> AdapterBank:
    """Return a bank with PEFT's own initial values."""
    kind_of = {block: kind for kind in meta.kinds for block in kind.blocks}
    bank = AdapterBank([kind_of[index].adapter for index in range(len(meta.blocks))], device)
    layers = dict(lora_layers(meta.blocks))
    initial: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for block, tensor, view in bank.tensors(bank.weights):
        name = f"{block}.{tensor.path}"
        if name not in initial:
            initial[name] = initial_weights(layers[name], name, seed)
        view.copy_(initial[name][0] if tensor.group == "lora_A" else initial[name][1])
        if tensor.group == "lora_B":
            del initial[name]
    return bank


def load_ends(
    meta: MetaModel,
    source: TensorSource,
    numerics: Numerics,
    device: torch.device,
    store: BlockStore,
    *,
    is_resident: bool,
) -> dict[str, Any]:
    """Load embedding, final norm and head. A tied table exists once per memory that reads it."""
    parts, config = meta.parts, meta.config
    table_name, head_name = f"{parts.embedding}.weight", f"{parts.head}.weight"

    def load(name: str, where: torch.device) -> torch.Tensor:
        expected = tuple(meta.module.state_dict()[name].shape)
        return load_checked(source, name, expected, where).to(numerics.storage_dtype)

    table = load(table_name, device if is_resident else torch.device("cpu"))
    streamed = range(len(meta.blocks), len(store.layouts))
    if streamed:
        head = table if parts.tied else load(head_name, torch.device("cpu"))
        chunks = []
        for index, rows in zip(streamed, head.split(numerics.loss_chunk_vocabulary), strict=True):
            chunks.append(store.layouts[index].views(store.block(index))[HEAD_ROWS])
            chunks[-1].copy_(rows)
    else:
        head = table.to(device) if parts.tied else load(head_name, device)
        chunks = list(head.split(numerics.loss_chunk_vocabulary))
    norm = _load_module(meta, parts.final_norm, load, device)
    scale = meta.architecture.embedding_scale(config, numerics.compute_dtype)
    return {
        "embedding": Embedding(table, device, numerics.compute_dtype, scale),
        "per_block": _per_block(meta, load, numerics, device, is_resident=is_resident),
        "head": LossHead(
            norm,
            chunks,
            compute_dtype=numerics.compute_dtype,
            chunk_positions=numerics.loss_chunk_positions,
            softcap=meta.architecture.logit_softcap(config),
            fused=is_fused(numerics.blocks, device.type),
        ),
    }


def _load_module(meta: MetaModel, path: str, load: Load, device: torch.device) -> nn.Module:
    """Return a copy of a meta module without children, its parameters read to the device in the storage dtype."""
    module = copy.deepcopy(meta.module.get_submodule(path))
    for name, _ in list(module.named_parameters()):
        assert "." not in name
        setattr(module, name, nn.Parameter(load(f"{path}.{name}", device), requires_grad=False))
    return module


def _per_block(
    meta: MetaModel, load: Load, numerics: Numerics, device: torch.device, *, is_resident: bool
) -> PerBlockTable | None:
    """Load the second token table and what mixes its rows in, if the model has one."""
    declared = meta.per_block_inputs
    if declared is None:
        return None
    where = device if is_resident else torch.device("cpu")
    scale = None if declared.scale is None else torch.tensor(declared.scale).to(numerics.compute_dtype)
    table = Embedding(load(f"{declared.table}.weight", where), device, numerics.compute_dtype, scale)
    modules = {
        path: _load_module(meta, path, load, device).to(numerics.compute_dtype) for path in declared.modules
    }
    return PerBlockTable(declared, table, modules, meta.architecture, meta.module)
