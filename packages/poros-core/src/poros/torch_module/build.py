"""`streamed_model`: from a checkpoint to a PEFT model that a stock trainer can run."""

from __future__ import annotations

from pathlib import Path

from peft import PeftModelForCausalLM
from torch import nn

from poros import determinism
from poros.adapters import ADAPTER, for_wrapper
from poros.blocks.store_cache import StoreCache
from poros.errors import ConfigError, explain
from poros.model import LoadedModel, load_model
from poros.plugins import Registry
from poros.run.device import refuse_many_processes, resolve_device
from poros.run.opening import OpenModel, open_model
from poros.settings import LoraSettings, Numerics, Plan
from poros.torch_module.model import StreamedForCausalLM
from poros.torch_module.skeleton import grow_skeleton, skeleton_lora_config
from poros.torch_module.visits import BlockVisits
from poros.wrappers import find_blocks, stock_model

__all__ = ["make_module", "streamed_model"]


def streamed_model(
    model: str | Path | OpenModel,
    *,
    quantization: str = "nf4",
    lora: LoraSettings | None = None,
    numerics: Numerics | None = None,
    plan: Plan | None = None,
    device: str = "auto",
    seed: int = 0,
    cache_dir: Path | str | None = None,
    registry: Registry | None = None,
) -> PeftModelForCausalLM:
    """Load a model whose frozen blocks stream under autograd, as a PEFT model with one adapter.

    It is a drop-in `nn.Module` for loops that are not Poros's own: Transformers' `Trainer`, TRL's `SFTTrainer` and
    `DPOTrainer`, one's own. Its adapters are ordinary float32 parameters under PEFT's names; nothing else is trainable.
    Every forward and every backward streams the blocks once: Poros's own `Trainer` visits each block once for all
    micro-batches of a step, captures graphs, and is the faster one.

    Args:
        model: local folder, hub id, or what `open_model` returned; then ``quantization``, ``lora`` and ``numerics`` are
            its own.
        quantization: registered name of the weight format.
        lora: adapters.
        numerics: settings that decide bits. ``length_bucket`` does not apply: rows are as the caller pads them.
        plan: placement; of it ``residency``, ``num_slots``, ``resident_blocks``, ``workspace`` and
            ``pin_host_memory`` apply. Graphs are off in this mode.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        seed: of the adapters' initial values.
        cache_dir: folder for quantized stores; see `RunSettings`.
        registry: loaded plugins; None loads the installed ones.

    Raises:
        UserError: several processes, or no such device.
        ConfigError: a setting that single visits cannot honour.
        CheckpointError, ArchitectureError, FormatError, PluginError: see `open_model`.

    Numerics:
        Streamed and resident (``Plan(residency="resident")``) are bitwise equal, as everywhere. Deterministic
        algorithms are switched on for the process.
    """
    plan = plan or Plan()
    refuse_many_processes()
    where = resolve_device(device)
    determinism.configure(where)
    if not isinstance(model, OpenModel):
        model = open_model(model, quantization=quantization, lora=lora, numerics=numerics, registry=registry)
    elif not (lora is None and numerics is None and quantization == "nf4"):
        raise ConfigError(
            explain(
                "Cannot change an open model",
                expected="its own `quantization`, `lora` and `numerics`",
                got="others",
                next_step="Give them to `open_model`",
            )
        )
    _check(plan, model.numerics)
    loaded = load_model(
        model.meta,
        source=model.source,
        weight_format=model.weight_format,
        numerics=model.numerics,
        plan=plan,
        device=where,
        seed=seed,
        cache=None if cache_dir is None else StoreCache(Path(cache_dir).expanduser()),
    )
    if model.start is not None:
        model.start.fill(loaded.bank)
    # Keys match the class that a user's own `AutoModelForCausalLM` gives, as those of a run's adapter do.
    path = find_blocks(stock_model(model.config), model.meta.blocks[0])
    return make_module(loaded, plan, path=path, name=model.name)


def make_module(loaded: LoadedModel, plan: Plan, *, path: str, name: str) -> PeftModelForCausalLM:
    """Wrap a loaded model.

    Args:
        loaded: its bank gives the adapters their values and is empty afterwards.
        plan: the one that it was loaded with.
        path: where the class that the adapter is saved for keeps its blocks.
        name: what the adapter's config calls the base.
    """
    meta = loaded.meta
    base = StreamedForCausalLM(BlockVisits(loaded, plan))
    grow_skeleton(base, path, meta.blocks, loaded.device)
    config = meta.lora_config if meta.wrapper is None else for_wrapper(meta.lora_config, path)
    # On the meta device: the values are the bank's.
    peft = PeftModelForCausalLM(base, skeleton_lora_config(config, name), low_cpu_mem_usage=True)
    places = base.get_submodule(path)
    assert isinstance(places, nn.ModuleList)
    for block, tensor, values in loaded.bank.tensors(loaded.bank.weights):
        layer = places[block].get_submodule(tensor.path)
        getattr(layer, tensor.group)[ADAPTER].weight = nn.Parameter(values.clone())
    loaded.bank.release()
    base.model.bind_adapters(places)
    return peft


def _check(plan: Plan, numerics: Numerics) -> None:
    """Refuse what only the engine can do."""
    refused = [
        ("plan.head", plan.head == "host", "`device`", "the loss and trainers read the head as one matrix"),
        ("plan.activations", plan.activations == "host", "`device`", "autograd keeps the block inputs"),
        ("plan.kept_blocks", plan.kept_blocks > 0, "0", "every block is recomputed in this mode"),
        ("numerics.blocks", numerics.blocks == "compiled", "`eager`", "compiled ones run in the engine only"),
        (
            "numerics.neftune_alpha",
            numerics.neftune_alpha > 0,
            "0: the trainer's `neftune_noise_alpha` does it",
            "its noise would not be the engine's",
        ),
    ]
    for where, wrong, expected, reason in refused:
        if wrong:
            raise ConfigError(
                explain("Cannot stream under autograd", expected=expected, got=reason, where=where)
            )
