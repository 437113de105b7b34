"""The names of settings: which exist, of which type, what is near to a name that does not exist.

A setting's *path* is what the user writes (``lora.rank``, ``plan.slots``); fields of the dataclasses may be called
otherwise.
"""

from __future__ import annotations

import difflib
import functools
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from types import SimpleNamespace
from typing import Any

from poros_cli.config import RunConfig
from poros_cli.values import Dtype

__all__ = ["REFUSED", "Setting", "nearest", "sections", "settings"]

RENAMED = {"plan.num_slots": "plan.slots", "plan.pin_host_memory": "plan.pin"}
# What other tools call it. Only named in error messages, never accepted: one name per setting.
FOREIGN = {
    "r": "lora.rank",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "target_modules": "lora.targets",
    "lora_target_modules": "lora.targets",
    "layers_to_transform": "lora.blocks",
    "lr": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.schedule",
    "max_norm": "optimizer.max_grad_norm",
    "batch_size": "micro_batch_size",
    "per_device_train_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "micro_batches",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "base_model": "model",
    "model_name_or_path": "model",
    "dataset": "data",
    "datasets": "data",
    "train_data": "data",
    "eval_dataset": "eval_data",
    "val_set_size": "eval_fraction",
    "val_size": "eval_fraction",
    "eval_split": "eval_fraction",
    "early_stopping_patience": "early_stop_patience",
    "early_stopping_threshold": "early_stop_min_delta",
    "load_best_model_at_end": "keep_best",
    "wandb_project": "report_to",
    "use_tensorboard": "report_to",
    "eval_prompts": "sample_prompts",
    "output_dir": "output",
    "max_seq_length": "max_length",
    "sequence_len": "max_length",
    "cutoff_len": "max_length",
    "save_steps": "save_every",
    "eval_steps": "eval_every",
    "save_total_limit": "keep_checkpoints",
    "vram_limit": "vram",
    "gpu_memory": "vram",
    "max_cpu_memory": "ram",
    "cpu_memory": "ram",
    "max_memory": "vram",
    "cutoff": "max_length",
    "unusable_rows": "rows.truncation",
    "truncation_side": "rows.truncation",
    "chat_template": "rows.template",
    "group_by_length": "rows.order",
    "sample_packing": "rows.packing",
    "pack_sequences": "rows.packing",
    "shuffle": "rows.order",
    "data_weights": "data",
    "dataset_prepared_path": "cache_dir",
    "load_in_4bit": "quantization",
    "load_in_8bit": "quantization",
    "optim": "optimizer.name",
    "loraplus_lr_ratio": "optimizer.lora_plus_ratio",
    "lr_scheduler": "optimizer.schedule",
    "num_decay_steps": "optimizer.decay_steps",
    "num_warmup_steps": "optimizer.warmup_steps",
    "noisy_embedding_alpha": "numerics.neftune_alpha",
    "neftune_noise_alpha": "numerics.neftune_alpha",
    "lora_model_dir": "lora.init_from",
    "adapter_name_or_path": "lora.init_from",
    "bf16": "numerics.compute_dtype",
    "dtype": "numerics.compute_dtype",
}
# What other tools have and Poros has not, with the reason.
DORA = (
    "DoRA is not offered: it trains a magnitude for every output feature beside `lora_A` and `lora_B`, and adapters "
    "here are these two. `lora.use_rslora` and `optimizer.lora_plus_ratio` change how LoRA learns"
)
REFUSED = {"use_dora": DORA, "lora_use_dora": DORA, "peft_use_dora": DORA, "dora": DORA}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting: where it goes and what it may hold.

    Attributes:
        path: what the user writes.
        section: field of `RunConfig` that holds its dataclass, or an empty string.
        declared: field of that dataclass.
        annotation: the field's type, with `Dtype` for torch's.
    """

    path: str
    section: str
    declared: Field[Any]
    annotation: Any

    @property
    def field(self) -> str:
        """Name of the dataclass's field."""
        return self.declared.name

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.declared.default is MISSING and self.declared.default_factory is MISSING

    @property
    def default(self) -> Any:
        """The default, None where there is none. That of a dtype imports torch."""
        if self.declared.default_factory is not MISSING:
            return self.declared.default_factory()
        return None if self.declared.default is MISSING else self.declared.default


@functools.cache
def settings() -> Mapping[str, Setting]:
    """Return every setting by path."""
    found = {}
    for owner, section in [(RunConfig, ""), *((kind, name) for name, kind in sections().items())]:
        hints = _hints(owner)
        for item in fields(owner):
            if is_dataclass(hints[item.name]):
                continue
            path = f"{section}.{item.name}" if section else item.name
            path = RENAMED.get(path, path)
            found[path] = Setting(path=path, section=section, declared=item, annotation=hints[item.name])
    return found


@functools.cache
def sections() -> Mapping[str, Any]:
    """Return the dataclass of every section by name."""
    return {name: hint for name, hint in _hints(RunConfig).items() if is_dataclass(hint)}


def _hints(owner: type) -> dict[str, Any]:
    return typing.get_type_hints(owner, localns={"torch": SimpleNamespace(dtype=Dtype)})


def nearest(path: str) -> str | None:
    """Return the known path that an unknown one most likely means, or None."""
    known = [*settings(), *sections()]
    leaf = path.rsplit(".", 1)[-1]
    if leaf in FOREIGN:
        return FOREIGN[leaf]
    same_leaf = [candidate for candidate in known if candidate.rsplit(".", 1)[-1] == leaf]
    if same_leaf:
        return same_leaf[0]
    close = difflib.get_close_matches(path, known, n=1)
    if close:
        return close[0]
    leaves = {candidate.rsplit(".", 1)[-1]: candidate for candidate in known}
    close = difflib.get_close_matches(leaf, list(leaves), n=1)
    return leaves[close[0]] if close else None
