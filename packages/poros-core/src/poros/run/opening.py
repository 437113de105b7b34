"""Opening a model: everything that can be found wrong with it before a weight is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from poros.adapters import base_linears, matched_blocks
from poros.architecture import ArchitectureVerdict, blockwise_arch_check
from poros.blocks.fill import check_shape
from poros.blocks.store_cache import StoreCache
from poros.checkpoint import MappedSource, SafetensorsSource, check_names, load_config, resolve_model
from poros.checkpoint.config import CONFIG_FILE
from poros.checkpoint.json_files import read_json_object
from poros.effective_config import config_notes, effective_config
from poros.engine.engine import Engine
from poros.interfaces import TensorSource, WeightFormat
from poros.model import MetaModel, load_model, make_meta_model
from poros.plugins import Registry, load_registry
from poros.run.formats import make_weight_format
from poros.settings import LoraSettings, Numerics, Plan
from poros.units import ranges

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from poros.run.initial_adapter import InitialAdapter

__all__ = ["OpenModel", "describe_model", "open_model", "open_with", "opening_notes"]

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenModel:
    """A model that passed every check and holds no weights yet.

    Attributes:
        name: what the user calls it: a folder or a hub id.
        config: as the folder has it; of a multimodal wrapper the text model's is ``meta.config``.
        folder: where its files lie.
        verdict: of the architecture gate.
        meta: the model on the meta device, frozen and injected.
        source: its weights by parameter name.
        start: the adapter that training starts from; None starts from PEFT's own initial values.
        notes: sentences that the user should see, such as tensors that are cast.
        make_engine: builds the engine of a loaded model; `poros verify` puts a broken one here.
    """

    name: str
    folder: Path
    config: PreTrainedConfig
    verdict: ArchitectureVerdict
    weight_format: WeightFormat
    lora: LoraSettings
    numerics: Numerics
    meta: MetaModel
    source: TensorSource
    start: InitialAdapter | None = None
    notes: tuple[str, ...] = ()
    make_engine: Callable[..., Engine] = Engine

    def load(
        self,
        *,
        plan: Plan,
        device: torch.device,
        seed: int,
        progress: Progress | None = None,
        cache_dir: Path | None = None,
    ) -> Engine:
        """Quantize the weights into the plan's store and return the engine; see `poros.model.load_model`."""
        model = load_model(
            self.meta,
            source=self.source,
            weight_format=self.weight_format,
            numerics=self.numerics,
            plan=plan,
            device=device,
            seed=seed,
            progress=progress,
            cache=None if cache_dir is None else StoreCache(cache_dir),
        )
        if self.start is not None:
            self.start.fill(model.bank)
        return self.make_engine(model, plan, seed=seed)


def describe_model(
    config: PreTrainedConfig,
    *,
    quantization: str = "nf4",
    lora: LoraSettings | None = None,
    numerics: Numerics | None = None,
    registry: Registry | None = None,
) -> tuple[ArchitectureVerdict, WeightFormat, MetaModel]:
    """Pass a config through the architecture gate and build its meta model; no weights are needed.

    Raises:
        ArchitectureError: the gate refuses the model.
        FormatError: ``quantization`` is not registered.
        ConfigError: a LoRA target matches nothing.
        PluginError: a plugin is broken.
    """
    registry = registry or load_registry()
    weight_format = make_weight_format(quantization, registry)
    verdict = blockwise_arch_check(config, registry)
    meta = make_meta_model(
        architecture=verdict.architecture,
        config=config,
        weight_format=weight_format,
        lora=lora or LoraSettings(),
        numerics=numerics or Numerics(),
    )
    return verdict, weight_format, meta


def open_model(
    model: str | Path,
    *,
    quantization: str = "nf4",
    lora: LoraSettings | None = None,
    numerics: Numerics | None = None,
    registry: Registry | None = None,
) -> OpenModel:
    """Open a model folder or hub model for training.

    Args:
        model: local folder, or hub id (downloaded unless it is in the hub's cache).
        quantization: registered name of the weight format.
        lora: adapters; the architecture's default targets where it names none.
        numerics: settings that decide bits.
        registry: loaded plugins; None loads the installed ones.

    Raises:
        CheckpointError: the folder, its config, a shard or the adapter to start from is missing or damaged; a tensor is
            absent, unknown or misshapen.
        ArchitectureError, FormatError, ConfigError, PluginError: see `describe_model`.
    """
    lora, numerics = lora or LoraSettings(), numerics or Numerics()
    folder = resolve_model(str(model))
    opened = open_with(
        lambda meta: _checked_weights(folder, meta, numerics),
        name=str(model),
        folder=folder,
        quantization=quantization,
        lora=lora,
        numerics=numerics,
        registry=registry,
    )
    start = None
    if lora.init_from is not None:
        # Here: adapters are read by what exports them, and that opens models.
        from poros.run.initial_adapter import read_initial_adapter

        start = read_initial_adapter(lora.init_from, opened.meta, opened.source.fingerprint)
    return replace(
        opened,
        start=start,
        notes=(
            *opening_notes(folder, opened.config, opened.meta),
            *opened.notes,
            *(start.notes if start is not None else ()),
        ),
    )


def open_with(
    weights: Callable[[MetaModel], tuple[TensorSource, tuple[str, ...]]],
    *,
    name: str,
    folder: Path,
    quantization: str,
    lora: LoraSettings,
    numerics: Numerics,
    registry: Registry | None,
) -> OpenModel:
    """Open the config of ``folder`` with whatever weights; no weight file is looked at here.

    Args:
        weights: returns the weights of a described model, and notes about them.
        name: what the user calls the model.

    Raises:
        CheckpointError: the config is missing or damaged.
        ArchitectureError, FormatError, ConfigError, PluginError: see `describe_model`.
    """
    config = load_config(folder)
    verdict, weight_format, meta = describe_model(
        config, quantization=quantization, lora=lora, numerics=numerics, registry=registry
    )
    source, notes = weights(meta)
    return OpenModel(
        name=name,
        folder=folder,
        config=config,
        verdict=verdict,
        weight_format=weight_format,
        lora=lora,
        numerics=numerics,
        meta=meta,
        source=source,
        notes=notes,
    )


def opening_notes(folder: Path, config: PreTrainedConfig, meta: MetaModel) -> tuple[str, ...]:
    """Return what the user should know before training: stated values not in effect, blocks without adapter."""
    effective = effective_config(meta.config, meta.architecture, meta.parts)
    notes = config_notes(read_json_object(folder / CONFIG_FILE), config, effective)
    matched = matched_blocks(meta.blocks, meta.targets)
    adapted = {index for blocks in matched.values() for index in blocks}
    wanted = range(len(meta.blocks)) if meta.lora_config.layers_to_transform is None else ()
    if bare := [index for index in wanted if index not in adapted]:
        return (
            *notes,
            f"{len(bare)} of {len(meta.blocks)} blocks get no adapter: no target matches in blocks {ranges(bare)}.",
        )
    return notes


def _checked_weights(
    folder: Path, meta: MetaModel, numerics: Numerics
) -> tuple[MappedSource, tuple[str, ...]]:
    """Return the weights of a folder, names and shapes checked, and which of them are cast."""
    source = SafetensorsSource(folder)
    names = _match_names(source, meta)
    return MappedSource(source, names), _cast_notes(source, names, meta, numerics)


def _match_names(source: SafetensorsSource, meta: MetaModel) -> Mapping[str, str]:
    """Return the file tensor of every parameter, names and shapes checked."""
    parts = meta.parts
    tied = {f"{parts.head}.weight": f"{parts.embedding}.weight"} if parts.tied else {}
    names = check_names(source, meta.tensor_names, ignored=meta.architecture.ignored(meta.config), tied=tied)
    # The meta model's linears are frozen by now: the shapes are those of a plain one.
    plain = meta.architecture.build(meta.config).state_dict()
    for name, file_name in names.items():
        check_shape(source, file_name, tuple(plain[name].shape))
    return names


def _cast_notes(
    source: SafetensorsSource, names: Mapping[str, str], meta: MetaModel, numerics: Numerics
) -> tuple[str, ...]:
    """Say which tensors are cast to the storage dtype; weights of linear layers go to their format instead."""
    quantized = {
        f"{meta.parts.blocks}.{index}.{path}.weight"
        for index, block in enumerate(meta.blocks)
        for path, _ in base_linears(block)
    }
    dtypes = Counter(str(source.dtype(file)) for name, file in names.items() if name not in quantized)
    dtypes.pop(str(numerics.storage_dtype), None)
    if not dtypes:
        return ()
    counted = ", ".join(f"{count} in {dtype}" for dtype, count in sorted(dtypes.items()))
    return (
        f"Norms, biases and vocabulary matrices are cast to {numerics.storage_dtype} once while loading "
        f"(`numerics.storage_dtype`); the files hold {counted}.",
    )
