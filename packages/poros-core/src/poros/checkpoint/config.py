"""Reading ``config.json`` into a Transformers config. Code that ships with a model is never run."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poros.checkpoint.json_files import read_json_object
from poros.checkpoint.paths import refuse_links_outside
from poros.errors import ArchitectureError, CheckpointError, explain

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["load_config", "transformers_knows", "unknown_type_error"]

CONFIG_FILE = "config.json"
# Fields that decide shapes. Transformers fills in a default where one is absent, which is another model's.
SIZE_FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
# A wrapper's nested text config may rely on the defaults of its own type; these differ for every size of a family.
NESTED_SIZE_FIELDS = ("hidden_size", "num_hidden_layers")
# Far above any published model. Layers are built one by one and some of their tables are computed at once, so a forged
# size would decide how long that takes and how much memory.
LARGEST_SIZES = {
    "num_hidden_layers": 1024,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "num_global_key_value_heads": 2**14,
    "head_dim": 2**14,
    "global_head_dim": 2**14,
    "linear_key_head_dim": 2**14,
    "linear_value_head_dim": 2**14,
    "linear_num_key_heads": 2**14,
    "linear_num_value_heads": 2**14,
    "linear_conv_kernel_dim": 2**14,
    "hidden_size": 2**20,
    "hidden_size_per_layer_input": 2**20,
    "intermediate_size": 2**24,
    "vocab_size": 2**26,
    "vocab_size_per_layer_input": 2**26,
}
MOE_MARKS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
# The first release of Transformers that has a type which Poros serves. Source: the model cards and the releases.
FIRST_VERSIONS = {
    "qwen2": "4.37.0",
    "qwen3": "4.51.0",
    "qwen3_5": "5.2.0",
    "qwen3_5_text": "5.2.0",
    "gemma3": "4.50.0",
    "gemma3_text": "4.50.0",
    "gemma4": "5.5.0",
    "gemma4_text": "5.5.0",
}
# How published models that are quantized this way are called beside their original.
QUANTIZED_NAMES = {
    "gptq": "the `-GPTQ-Int4` or `-GPTQ-Int8` one",
    "awq": "the `-AWQ` one",
    "bitsandbytes": "the `-bnb-4bit` or `-bnb-8bit` one",
    "fp8": "the `-FP8` one",
}


def transformers_knows(model_type: str) -> bool:
    """Say whether the installed Transformers has a config class for ``model_type``."""
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def unknown_type_error(model_type: str, where: str) -> ArchitectureError:
    """Return the error for a type that Transformers lacks: it is too old for a type that Poros serves, or unknown."""
    import transformers

    if needed := FIRST_VERSIONS.get(model_type):
        return ArchitectureError(
            explain(
                f"Transformers is too old for model type `{model_type}`, which Poros serves",
                expected=f"Transformers {needed} or newer, the first that has the type",
                got=f"Transformers {transformers.__version__}",
                where=where,
                next_step="Run `uv lock --upgrade-package transformers`, or `pip install -U transformers`",
            )
        )
    near = difflib.get_close_matches(model_type, list(transformers.CONFIG_MAPPING), n=1, cutoff=0.8)
    return ArchitectureError(
        explain(
            "Unknown model type",
            expected=f"a type that the installed Transformers {transformers.__version__} knows",
            got=f"`{model_type}`, which Poros does not know either",
            where=where,
            next_step="Upgrade Transformers if the model is newer than it (`uv lock --upgrade-package transformers`)"
            + (f", or correct `model_type`: the nearest known one is `{near[0]}`" if near else "")
            + ". Whether Poros supports the type is decided after that (docs/plugins.md: how to add one)",
        )
    )


def load_config(folder: Path) -> PreTrainedConfig:
    """Read a model folder's config.

    Raises:
        CheckpointError: no config.json, bad JSON (with line and column), no ``model_type``, a field that decides
            shapes is absent, no positive integer or beyond any model, or the weights are quantized already.
        ArchitectureError: Transformers does not know the type, or the model computes with code of its own.
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
    refuse_links_outside(folder, (CONFIG_FILE,))
    raw = read_json_object(path)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise _bad(path, "`model_type` to name the architecture", repr(model_type))
    if raw.get("auto_map"):
        raise _own_code_error(model_type, str(path))
    if not transformers_knows(model_type):
        raise unknown_type_error(model_type, str(path))
    _reject_quantized(path, raw)
    _reject_huge(path, raw)
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # every config class validates in its own way
        got = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise _bad(path, f"a valid `{model_type}` config", got) from error
    _check_sizes(path, raw, config)
    return config


def _own_code_error(model_type: str, where: str) -> ArchitectureError:
    known = (
        f"`{model_type}` without it"
        if transformers_knows(model_type)
        else "a model of Transformers' own classes"
    )
    return ArchitectureError(
        explain(
            "This model computes with code that ships with it (`auto_map`), and Poros never runs such code",
            expected=known,
            got="`auto_map`, which asks for `trust_remote_code`",
            where=where,
            next_step="If Transformers' own class computes the same, remove `auto_map` from config.json",
        )
    )


def _reject_quantized(path: Path, raw: Mapping[str, Any]) -> None:
    """Refuse weights that are quantized already, in the model or in the text model that it wraps."""
    text = raw.get("text_config")
    stated = raw.get("quantization_config") or raw.get("compression_config")
    if isinstance(text, Mapping):
        stated = stated or text.get("quantization_config")
    if not stated:
        return
    stated = stated if isinstance(stated, Mapping) else {}
    method = str(stated.get("quant_method") or "an unnamed method")
    bits = stated.get("bits") or (
        4 if stated.get("load_in_4bit") else 8 if stated.get("load_in_8bit") else None
    )
    raise _bad(
        path,
        "unquantized weights",
        f"weights quantized with {method}" + (f", {bits} bits" if bits else ""),
        f"Name the original model in bf16, the one that {QUANTIZED_NAMES.get(method, 'this one')} was made from: Poros "
        "quantizes it by itself (`quantization: nf4`)",
    )


def _reject_huge(path: Path, raw: Mapping[str, Any]) -> None:
    nested = raw.get("text_config")
    for prefix, fields in (("", raw), ("text_config.", nested if isinstance(nested, Mapping) else {})):
        for name, largest in LARGEST_SIZES.items():
            value = fields.get(name)
            if isinstance(value, int | float) and not value <= largest:
                raise _bad(path, f"`{prefix}{name}` to be at most {largest}", f"{value!r:.80}")


def _check_sizes(path: Path, raw: Mapping[str, Any], config: PreTrainedConfig) -> None:
    if raw.get("num_experts_per_tok"):
        return  # the gate refuses experts by name; a size that is absent as well would hide why
    nested = raw.get("text_config")
    if nested is None and getattr(config, "text_config", None) is not None:
        raise _bad(path, "the field `text_config`", "none", "Download config.json again")
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
