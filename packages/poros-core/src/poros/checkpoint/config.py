"""Reading ``config.json`` into a Transformers config. Code that ships with a model is never run."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poros.checkpoint.json_files import read_json_object
from poros.errors import ArchitectureError, CheckpointError, explain

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["load_config", "transformers_knows", "unknown_type_error"]

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
# Fields that decide shapes. Transformers fills in a default where one is absent, which is another model's.
SIZE_FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
# A wrapper's nested text config may rely on the defaults of its own type; these differ for every size of a family.
NESTED_SIZE_FIELDS = ("hidden_size", "num_hidden_layers")
MOE_MARKS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


def transformers_knows(model_type: str) -> bool:
    """Say whether the installed Transformers has a config class for ``model_type``."""
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def unknown_type_error(model_type: str, where: str, *, custom_code: bool = False) -> ArchitectureError:
    """Return the error for a type that Transformers lacks: too old, misspelt, or a model that brings code."""
    import transformers

    near = difflib.get_close_matches(model_type, list(transformers.CONFIG_MAPPING), n=1, cutoff=0.8)
    if custom_code:
        next_step = "This model needs code that ships with it (`auto_map`), and Poros never runs such code"
    else:
        next_step = (
            "Upgrade Transformers if the model is newer than it (`uv lock --upgrade-package transformers`)"
            + (f", or correct `model_type`: the nearest known one is `{near[0]}`" if near else "")
            + ". Whether Poros supports the type is decided after that"
        )
    return ArchitectureError(
        explain(
            "Unknown model type",
            expected=f"a type that the installed Transformers {transformers.__version__} knows",
            got=f"`{model_type}`",
            where=where,
            next_step=next_step,
        )
    )


def load_config(folder: Path) -> PreTrainedConfig:
    """Read a model folder's config.

    Raises:
        CheckpointError: no config.json, bad JSON (with line and column), no ``model_type``, a field that decides
            shapes is absent or no positive integer, or the weights are quantized already.
        ArchitectureError: Transformers does not know the type.
    """
    from transformers import AutoConfig

    path = folder / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(
            explain(
                "Cannot read a model",
                expected=f"a {CONFIG_FILE}",
                got="no such file",
                where=str(folder),
                next_step="Name the folder that holds the model",
            )
        )
    raw = read_json_object(path)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise _bad(path, "`model_type` to name the architecture", repr(model_type))
    custom_code = bool(raw.get("auto_map"))
    if not transformers_knows(model_type):
        raise unknown_type_error(model_type, str(path), custom_code=custom_code)
    if custom_code:
        logger.warning("%s names code that ships with the model (`auto_map`): it is ignored.", path)
    if raw.get("quantization_config"):
        method = raw["quantization_config"]
        method = method.get("quant_method", "an unnamed method") if isinstance(method, dict) else method
        raise _bad(
            path,
            "unquantized weights",
            f"weights quantized with {method}",
            "Name the original model in bf16: Poros quantizes it by itself",
        )
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # every config class validates in its own way
        got = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise _bad(path, f"a valid `{model_type}` config", got) from error
    _check_sizes(path, raw, config)
    return config


def _check_sizes(path: Path, raw: Mapping[str, Any], config: PreTrainedConfig) -> None:
    nested = raw.get("text_config")
    if isinstance(nested, dict):
        text = getattr(config, "text_config", config)
        _check_fields(path, nested, text, NESTED_SIZE_FIELDS, "text_config.")
    else:
        _check_fields(path, raw, config, SIZE_FIELDS, "")


def _check_fields(
    path: Path, raw: Mapping[str, Any], config: PreTrainedConfig, fields: tuple[str, ...], prefix: str
) -> None:
    """Check the fields that this config class has, under the names that it gives them (GPT-2's ``n_embd``)."""
    for field in fields:
        if not hasattr(config, field) or (
            field == "intermediate_size" and any(mark in raw for mark in MOE_MARKS)
        ):
            continue
        own_name = getattr(config, "attribute_map", {}).get(field, field)
        value = raw.get(field, raw.get(own_name))
        if value is None:
            raise _bad(path, f"the field `{prefix}{own_name}`", "none", "Download config.json again")
        if type(value) is not int or value <= 0:
            raise _bad(path, f"`{prefix}{own_name}` to be a positive integer", repr(value))


def _bad(path: Path, expected: str, got: str, next_step: str | None = None) -> CheckpointError:
    return CheckpointError(
        explain(
            "Cannot use a model's config", expected=expected, got=got, where=str(path), next_step=next_step
        )
    )
