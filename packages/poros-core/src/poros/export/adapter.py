"""Finding an adapter: the folder of a Poros run, or a plain PEFT folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from poros.checkpoint import load_adapter
from poros.checkpoint.adapter_files import CONFIG_FILE
from poros.checkpoint.json_files import read_json_object
from poros.errors import CheckpointError, ConfigError, explain
from poros.plugins import Registry
from poros.run.final_adapter import ADAPTER_FOLDER
from poros.run.record import RUN_FILE
from poros.settings import Numerics, named_dtypes

if TYPE_CHECKING:
    from peft import LoraConfig

__all__ = ["Adapter", "find_adapter"]

# Fields of PEFT's config with which an adapter is more than the product of its two matrices. True where the value is
# none of the harmless ones.
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
    "fan_in_fan_out": (False, None),
}
# Ways to begin that leave the base as it is. The others subtract the adapter's start from the base's weights.
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """A LoRA adapter in memory.

    Attributes:
        folder: where it lies.
        config: PEFT's.
        tensors: by PEFT's key, on the CPU.
        run: ``run.json`` of the Poros run that trained it, or None.
    """

    folder: Path
    config: LoraConfig
    tensors: Mapping[str, torch.Tensor]
    run: Mapping[str, Any] | None

    @property
    def base_model(self) -> str | None:
        """Folder or hub id of the base that it names."""
        name: str | None = self.config.base_model_name_or_path
        return name or None

    @property
    def _fingerprint(self) -> Mapping[str, Any]:
        found = (self.run or {}).get("fingerprint")
        return found if isinstance(found, Mapping) else {}

    @property
    def base_fingerprint(self) -> str | None:
        """Fingerprint of the weights that it was trained on; None where no run tells."""
        return self._fingerprint.get("model.weights")

    @property
    def format_fingerprint(self) -> str | None:
        """What decided the bytes of the quantized base; None where no run tells."""
        return self._fingerprint.get("quantization")

    @property
    def trained_on(self) -> str | None:
        """Name of the device that it was trained on; None where no run tells."""
        return self._fingerprint.get("environment.device")

    def quantization(self, registry: Registry) -> str | None:
        """Return the registered weight format of the base that it was trained on; None where no run tells."""
        stated = self.format_fingerprint
        names = [
            name for name in registry.weight_formats if stated == name or str(stated).startswith(f"{name}-")
        ]
        return max(names, key=len, default=None)

    def numerics(self) -> Numerics:
        """Return the run's settings that decide bits, defaults where no run tells."""
        stated, default = self._fingerprint, Numerics()

        def dtype(name: str) -> torch.dtype:
            return named_dtypes().get(str(stated.get(f"numerics.{name}")), getattr(default, name))

        return Numerics(compute_dtype=dtype("compute_dtype"), storage_dtype=dtype("storage_dtype"))


def find_adapter(path: Path | str) -> Adapter:
    """Read an adapter.

    Args:
        path: the output folder of a run, its folder ``adapter``, or a folder that PEFT wrote.

    Raises:
        CheckpointError: there is none, a file is damaged, or the run has not finished.
        ConfigError: it is more than a LoRA adapter of linear layers.
    """
    path = Path(path).expanduser().resolve()
    if (path / CONFIG_FILE).is_file():
        folder, record = path, path.parent / RUN_FILE
        run = read_json_object(record) if path.name == ADAPTER_FOLDER and record.is_file() else None
    elif (path / RUN_FILE).is_file():
        folder, run = path / ADAPTER_FOLDER, read_json_object(path / RUN_FILE)
        if not folder.is_dir():
            raise CheckpointError(
                explain(
                    "The run has no adapter yet",
                    expected=f"the folder `{ADAPTER_FOLDER}`, which a run writes when it ends",
                    got="a run that was interrupted, or that still runs",
                    where=str(path),
                    next_step="Finish it with `poros train ... --resume`",
                )
            )
    else:
        raise CheckpointError(
            explain(
                "Cannot read an adapter",
                expected=f"the output folder of a run ({RUN_FILE}) or a PEFT folder ({CONFIG_FILE})",
                got="neither" if path.is_dir() else "a file" if path.exists() else "no such folder",
                where=str(path),
            )
        )
    _refuse_features(folder, read_json_object(folder / CONFIG_FILE))
    config, tensors = load_adapter(folder)
    return Adapter(folder=folder, config=config, tensors=tensors, run=run)


def _refuse_features(folder: Path, raw: Mapping[str, Any]) -> None:
    """Refuse what PEFT computes besides ``scaling * B @ A``."""
    found = {field: raw[field] for field, harmless in HARMLESS.items() if raw.get(field) not in harmless}
    start = raw.get("init_lora_weights")
    if start not in PLAIN_STARTS:
        found["init_lora_weights"] = start
    if not found:
        return
    (field, value), *_ = found.items()
    advice = "Use PEFT's own `merge_and_unload` for it"
    if field == "init_lora_weights":
        advice = "Convert it with PEFT's `path_initial_model_for_weight_conversion`: it was trained on a changed base"
    raise ConfigError(
        explain(
            "This adapter is more than LoRA on linear layers",
            expected=f"`{field}` to be {HARMLESS.get(field, PLAIN_STARTS)[0]!r}",
            got=repr(value),
            where=str(folder / CONFIG_FILE),
            next_step=advice,
        )
    )
