"""Adapters in PEFT's own file format, and the proof that stock PEFT reads them back.

Only ``lora_A`` and ``lora_B`` weights are written, from the tensors that are passed in: never from a model's
``state_dict()``, whose base tensors may be placeholders or large.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from poros.checkpoint.adapter_config import check_lora_fields
from poros.checkpoint.atomic import atomic_folder
from poros.checkpoint.json_files import read_json_object
from poros.checkpoint.manifest import MANIFEST_FILE, check_manifest
from poros.checkpoint.paths import refuse_links_outside
from poros.checkpoint.tensor_file import check_finite, load_tensors, save_tensors
from poros.errors import CheckpointError, explain

if TYPE_CHECKING:
    from peft import LoraConfig

__all__ = ["AdapterReport", "load_adapter", "save_adapter", "verify_adapter"]

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
ADAPTER_NAME = "default"
MAX_NAMED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterReport:
    """What a verified adapter folder holds.

    Attributes:
        base_class: the model class that its keys match.
        blocks: where that class keeps the adapted blocks; every key starts with ``base_model.model.`` and this.
    """

    base_class: str
    blocks: str
    num_modules: int
    num_tensors: int
    num_bytes: int


def save_adapter(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    lora_config: LoraConfig,
    base_model: str,
    *,
    made_for: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write an adapter folder as ``PeftModel.save_pretrained`` does, in one atomic step, and return it.

    Args:
        folder: where it will appear.
        tensors: ``base_model.model.<module>.lora_A.weight`` (R, in_features) and ``...lora_B.weight``
            (out_features, R), any device.
        lora_config: what the adapter was made with; it is not changed.
        base_model: folder or hub id of the base, recorded for whoever loads the adapter.
        made_for: recorded in the weights file: the model class and block path that the keys match.
        overwrite: replace an existing folder.

    Raises:
        CheckpointError: no tensors, a key that is no LoRA weight, or a half of a pair is missing or does not fit.
        NonFiniteError: a tensor holds NaN or infinity.
        OutputError: ``folder`` exists, or the disk is full or refuses the write.
    """
    _check_pairs(tensors, str(folder))
    check_finite(tensors, "The adapter")
    config = copy.copy(lora_config)
    config.inference_mode = True
    config.base_model_name_or_path = base_model
    for field in ("target_modules", "exclude_modules"):
        if isinstance(getattr(config, field), set):
            # PEFT would write the set in an order that changes from process to process.
            setattr(config, field, sorted(getattr(config, field)))
    with atomic_folder(folder, overwrite=overwrite) as temporary:
        config.save_pretrained(str(temporary))
        save_tensors(temporary / WEIGHTS_FILE, tensors, {"format": "pt", **(made_for or {})})
    return folder


def load_adapter(folder: Path) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """Read an adapter folder that Poros or PEFT wrote; tensors come on the CPU.

    Raises:
        CheckpointError: a file is missing or damaged, it is no LoRA adapter, or it holds more than LoRA weights.
    """
    from peft import LoraConfig

    if not (folder / CONFIG_FILE).is_file() or not (folder / WEIGHTS_FILE).is_file():
        raise CheckpointError(
            explain(
                "Cannot read an adapter",
                expected=f"{CONFIG_FILE} and {WEIGHTS_FILE}",
                got=sorted(path.name for path in folder.iterdir()) if folder.is_dir() else "no such folder",
                where=str(folder),
            )
        )
    refuse_links_outside(folder, (CONFIG_FILE, WEIGHTS_FILE))
    if (folder / MANIFEST_FILE).exists():
        check_manifest(folder)
    peft_type = read_json_object(folder / CONFIG_FILE).get("peft_type")
    if peft_type != "LORA":
        raise CheckpointError(
            explain(
                "Cannot use an adapter", expected="peft_type LORA", got=repr(peft_type), where=str(folder)
            )
        )
    try:
        config = LoraConfig.from_pretrained(str(folder))
    except Exception as error:  # its fields are checked in many ways, or not at all
        got = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckpointError(
            explain(
                "Cannot use an adapter", expected="PEFT's config", got=got, where=str(folder / CONFIG_FILE)
            )
        ) from error
    check_lora_fields(config, folder / CONFIG_FILE)
    tensors = load_tensors(folder / WEIGHTS_FILE)
    _check_pairs(tensors, str(folder))
    return config, tensors


def verify_adapter(
    folder: Path, build_base: Callable[[], nn.Module], *, require_nonzero: bool = True
) -> AdapterReport:
    """Reload a saved adapter with stock PEFT onto a base on the meta device and check that all of it arrives.

    Args:
        folder: what `save_adapter` wrote.
        build_base: builds the model class that users will load the adapter onto, on the meta device.
        require_nonzero: at least one ``lora_B`` must have a non-zero value; false for the dry save before step 1.

    Raises:
        CheckpointError: missing or unexpected keys, shapes that differ, other than two tensors for each matched
            module, or an adapter without effect.
        NonFiniteError: a tensor holds NaN or infinity.
    """
    from peft import get_peft_model, set_peft_model_state_dict
    from peft.tuners.lora import LoraLayer

    config, tensors = load_adapter(folder)
    check_finite(tensors, "The adapter")
    config.base_model_name_or_path = None  # PEFT would warn that the model built here has no name
    try:
        model = get_peft_model(build_base(), config, adapter_name=ADAPTER_NAME, low_cpu_mem_usage=True)
        result = set_peft_model_state_dict(model, tensors, adapter_name=ADAPTER_NAME, low_cpu_mem_usage=True)
    except (ValueError, RuntimeError) as error:  # no target matched; shapes differ
        got = " ".join(str(error).split())[:500]
        raise _unusable(folder, "an adapter that stock PEFT can load", got) from error
    missing = [key for key in result.missing_keys if ".lora_" in key]
    if missing or result.unexpected_keys:
        unexpected = list(result.unexpected_keys)
        raise _unusable(
            folder,
            "0 missing and 0 unexpected keys in stock PEFT",
            f"{len(missing)} missing {missing[:MAX_NAMED]}, "
            f"{len(unexpected)} unexpected {unexpected[:MAX_NAMED]} on {type(model.get_base_model()).__name__}",
        )
    modules = [module for module in model.modules() if isinstance(module, LoraLayer)]
    num_modules = sum(ADAPTER_NAME in module.lora_A for module in modules)
    if len(tensors) != 2 * num_modules:
        raise _unusable(folder, f"2 tensors for each of {num_modules} modules", f"{len(tensors)} tensors")
    if require_nonzero and not any(tensor.any() for name, tensor in tensors.items() if ".lora_B." in name):
        raise _unusable(folder, "a non-zero `lora_B`", "only zeros: the adapter has no effect")
    return AdapterReport(
        base_class=type(model.get_base_model()).__name__,
        blocks=_common_path(tensors),
        num_modules=num_modules,
        num_tensors=len(tensors),
        num_bytes=(folder / WEIGHTS_FILE).stat().st_size,
    )


def _common_path(names: Collection[str]) -> str:
    """Return what precedes the block index in every key: ``model.layers``, or a wrapper's longer path."""
    paths = {re.split(r"\.\d+\.", name.removeprefix("base_model.model."), maxsplit=1)[0] for name in names}
    return " and ".join(sorted(paths))


def _check_pairs(tensors: Mapping[str, torch.Tensor], where: str) -> None:
    if not tensors:
        raise CheckpointError(explain("Empty adapter", expected="LoRA tensors", got="none", where=where))
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = KEY.fullmatch(name)
        if match is None:
            raise CheckpointError(
                explain(
                    "Not a LoRA weight",
                    expected="only keys `base_model.model.<module>.lora_A.weight` and `...lora_B.weight`",
                    got=f"`{name}`",
                    where=where,
                )
            )
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    for module, pair in sides.items():
        shapes = {side: tuple(tensor.shape) for side, tensor in sorted(pair.items())}
        if set(pair) != {"A", "B"} or any(len(s) != 2 or 0 in s for s in shapes.values()):
            raise CheckpointError(
                explain(
                    "Incomplete adapter pair", expected="2-D A and B", got=shapes, where=f"module `{module}`"
                )
            )
        if pair["A"].shape[0] != pair["B"].shape[1]:
            raise CheckpointError(
                explain(
                    "Adapter pair does not fit", expected="one rank", got=shapes, where=f"module `{module}`"
                )
            )


def _unusable(folder: Path, expected: str, got: str) -> CheckpointError:
    return CheckpointError(
        explain(
            "The saved adapter is unusable",
            expected=expected,
            got=got,
            where=str(folder),
            next_step="The run is no success; the run's last checkpoint still holds the trained values",
        )
    )
