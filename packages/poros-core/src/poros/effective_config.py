"""What a config means once Transformers has read it, and where its file states another value.

Transformers converts old keys, drops some and fills in the rest without a word; a wrong rotary base trains a model that
looks right and is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from poros.interfaces import Architecture, ModelParts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["TIED", "EffectiveConfig", "config_notes", "effective_config"]

# Stated in config files for whoever reads them; nothing is computed with these.
NOT_COMPUTED = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "dtype",
        "model_type",
        "text_config",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
# Rotary bases as files stated them before Transformers 5.
BASE_KEYS = ("rope_theta", "rope_local_base_freq")
# Layer types that use no rotary table.
WITHOUT_ROTARY = ("linear_attention",)
TIED = {True: "tied to the embedding", False: "its own matrix"}


@dataclass(frozen=True, kw_only=True, slots=True)
class EffectiveConfig:
    """What decides attention and the head, as it is in effect.

    Attributes:
        rotary: per layer type, (base, kind of scaling); empty where the config states no rotary parameters.
        windows: (tokens or None for all, blocks), by first block.
        tied: the head is the embedding's matrix.
    """

    rotary: Mapping[str, tuple[float, str]]
    windows: tuple[tuple[int | None, tuple[int, ...]], ...]
    tied: bool


def effective_config(
    config: PreTrainedConfig, architecture: Architecture, parts: ModelParts
) -> EffectiveConfig:
    """Read what is in effect off a config as Transformers made it."""
    text = config.get_text_config()
    types = [architecture.layer_type(text, index) for index in range(text.num_hidden_layers)]
    parameters = getattr(text, "rope_parameters", None) or {}
    rotary = {}
    for layer_type in sorted(set(types) - set(WITHOUT_ROTARY)):
        own = parameters.get(layer_type, parameters)
        if isinstance(own, Mapping) and "rope_theta" in own:
            rotary[layer_type] = (float(own["rope_theta"]), str(own.get("rope_type", "default")))
    windows: dict[int | None, list[int]] = {}
    for index, layer_type in enumerate(types):
        window = getattr(text, "sliding_window", None) if layer_type == "sliding_attention" else None
        windows.setdefault(window, []).append(index)
    return EffectiveConfig(
        rotary=rotary,
        windows=tuple((window, tuple(blocks)) for window, blocks in windows.items()),
        tied=parts.tied,
    )


def config_notes(
    raw: Mapping[str, Any], config: PreTrainedConfig, effective: EffectiveConfig
) -> tuple[str, ...]:
    """Return a sentence for each value of config.json that is not the one in effect.

    Args:
        raw: the file's content.
        config: what Transformers made of it.
    """
    notes = []
    text = config.get_text_config()
    inner = raw.get("text_config")
    if text is not config:
        others = [n.removesuffix("_config") for n in sorted(raw) if n in ("vision_config", "audio_config")]
        notes.append(
            f"`{config.model_type}` is a multimodal wrapper: its text tower `{text.model_type}` is trained, "
            f"{' and '.join(others) or 'whatever else it wraps'} is not loaded."
        )
    stated = inner if isinstance(inner, Mapping) else raw
    notes += _rotary_notes(stated, effective)
    notes += _head_notes(raw, stated, effective)
    notes += _field_notes(stated, text)
    return tuple(notes)


def _rotary_notes(stated: Mapping[str, Any], effective: EffectiveConfig) -> Iterator[str]:
    in_effect = {base for base, _ in effective.rotary.values()}
    listed = ", ".join(f"{base:,.0f} ({kind})" for kind, (base, _) in effective.rotary.items())
    bases = {key: stated.get(key) for key in BASE_KEYS}
    parameters = stated.get("rope_parameters")
    if isinstance(parameters, Mapping):
        bases["rope_parameters.rope_theta"] = parameters.get("rope_theta")
        for name, own in parameters.items():
            if isinstance(own, Mapping):
                bases[f"rope_parameters.{name}.rope_theta"] = own.get("rope_theta")
    for key, value in bases.items():
        if in_effect and isinstance(value, int | float) and float(value) not in in_effect:
            yield f"config.json states `{key}` {value:,.0f}; the rotary base in effect is {listed}."
    scaling = stated.get("rope_scaling")
    if isinstance(scaling, Mapping) and effective.rotary:
        kind = scaling.get("rope_type", scaling.get("type"))
        kinds = {kind for _, kind in effective.rotary.values()}
        if kind is not None and kind not in kinds:
            yield f"config.json states `rope_scaling` of type `{kind}`; in effect is {', '.join(sorted(kinds))}."


def _head_notes(
    raw: Mapping[str, Any], stated: Mapping[str, Any], effective: EffectiveConfig
) -> Iterator[str]:
    for where, part in {"": raw, "text_config.": stated if stated is not raw else {}}.items():
        value = part.get("tie_word_embeddings")
        if isinstance(value, bool) and value != effective.tied:
            yield (
                f"config.json states `{where}tie_word_embeddings` {str(value).lower()}; in effect the head is "
                f"{TIED[effective.tied]}."
            )


def _field_notes(stated: Mapping[str, Any], text: PreTrainedConfig) -> Iterator[str]:
    """Compare plain fields with what became of them, and name keys that the class does not have."""
    fields = set(getattr(type(text), "__dataclass_fields__", vars(text)))
    names = dict(getattr(text, "attribute_map", {}))
    varying = getattr(text, "per_layer_attributes", None) or ()
    unknown = []
    for key, value in stated.items():
        own = names.get(key, key)
        if key in NOT_COMPUTED or key in (
            *BASE_KEYS,
            "rope_scaling",
            "rope_parameters",
            "tie_word_embeddings",
        ):
            continue
        if own not in fields:
            if value is not None and not _changes(text, stated, key):
                unknown.append(key)
            continue
        if own in varying:  # no single value is in effect, and reading one raises
            continue
        found = getattr(text, own)
        if isinstance(value, bool | int | float | str) and found != value:
            yield f"config.json states `{key}` {value!r}; in effect is {found!r}."
    if unknown:
        listed = ", ".join(f"`{key}`" for key in sorted(unknown))
        yield (
            f"config.json states keys that {type(text).__name__} does not declare: {listed}. They have no effect "
            "unless a layer asks for one by name."
        )


def _changes(text: PreTrainedConfig, stated: Mapping[str, Any], key: str) -> bool:
    """Whether an undeclared key changes a declared field, as the old names of fields do.

    A number is also doubled: left out, it may be replaced by an equal default.
    """
    variants = [{name: value for name, value in stated.items() if name != key}]
    if isinstance(value := stated[key], int | float):
        variants.append({**stated, key: value * 2})
    mine = type(text).from_dict(dict(stated)).to_dict()
    return any(
        mine.get(name) != value
        for variant in variants
        for name, value in type(text).from_dict(variant).to_dict().items()
        if name != key
    )
