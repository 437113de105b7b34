"""Which file tensor feeds which parameter: everything needed must exist, everything else must be known.

Transformers 5 changed prefixes more than once; a wrapper's checkpoint read into a text class then leaves parameters at
their random start without an error. Here every parameter comes from a named file tensor or the run is refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from poros.errors import CheckpointError, explain
from poros.interfaces import TensorSource

__all__ = ["KNOWN_HARMLESS", "MappedSource", "check_names"]

# Buffers that older saves wrote and that every model computes by itself.
KNOWN_HARMLESS = (r"(.*\.)?rotary_emb\.inv_freq",)

# How a parameter of the text model is called in files, by who wrote them.
LAYOUTS: tuple[Callable[[str], str], ...] = (
    lambda name: name,
    lambda name: "language_model." + name,
    lambda name: re.sub(r"^model\.", "model.language_model.", name),
    lambda name: name.removeprefix("model."),
)

MAX_NAMED = 5


def check_names(
    source: TensorSource,
    expected: Iterable[str],
    *,
    ignored: Iterable[str] = (),
    tied: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the file tensor that feeds each expected parameter.

    File names may carry a wrapper's prefix (``language_model.model.*``, ``model.language_model.*``) or lack
    ``model.``; all tensors of one file set follow the same layout.

    Args:
        expected: parameter names of the text model that must come from the files. A tied head is not among them.
        ignored: regular expressions that match the *whole* name of file tensors which are not needed.
        tied: names that share another parameter's memory (``lm_head.weight`` -> ``model.embed_tokens.weight``). A file
            may repeat such a tensor; then it must hold the same bytes.

    Raises:
        CheckpointError: a parameter has no file tensor (the nearest name is suggested), a file tensor is neither
            expected nor ignored, or a repeated tied tensor differs from its twin.
    """
    wanted = list(expected)
    present = set(source.names())
    layout = max(LAYOUTS, key=lambda rename: sum(rename(name) in present for name in wanted))
    names = {name: layout(name) for name in wanted}
    _reject_missing(source, names)
    twins = {layout(name): layout(twin) for name, twin in (tied or {}).items()}
    patterns = [re.compile(pattern) for pattern in (*KNOWN_HARMLESS, *ignored)]
    used = set(names.values()) | set(twins)
    unexpected = [
        name for name in source.names() if name not in used and not any(p.fullmatch(name) for p in patterns)
    ]
    if unexpected:
        raise CheckpointError(
            explain(
                "The model's files hold unknown tensors",
                expected=f"the {len(names)} tensors of the text model and known extras",
                got=f"{len(unexpected)} more: {_some(unexpected)}",
                next_step="This is another architecture than its config says, or one that Poros does not support",
            )
        )
    for name, twin in twins.items():
        if name in present and not _same(source, name, twin):
            raise CheckpointError(
                explain(
                    "Tied tensors differ",
                    expected=f"`{name}` equal to `{twin}`, because the config ties them",
                    got="different values",
                    next_step="Set `tie_word_embeddings` to false in config.json, or save the model again",
                )
            )
    return names


class MappedSource:
    """A `TensorSource` under the model's own names; names that are not mapped are not there.

    Args:
        source: the files' tensors.
        names: parameter -> file tensor, from `check_names`.
    """

    def __init__(self, source: TensorSource, names: Mapping[str, str]) -> None:
        self.fingerprint = source.fingerprint
        self._source = source
        self._names = names

    def names(self) -> Sequence[str]:
        """Return every parameter's name."""
        return tuple(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading its data."""
        return self._source.shape(self._file_name(name))

    def load(self, name: str, device: torch.device) -> torch.Tensor:
        """Read one tensor to ``device`` in its stored dtype. Raises `CheckpointError` if it is absent."""
        return self._source.load(self._file_name(name), device)

    def _file_name(self, name: str) -> str:
        if name not in self._names:
            raise CheckpointError(
                explain("A tensor is missing", expected="a parameter that was checked", got=f"`{name}`")
            )
        return self._names[name]


def _reject_missing(source: TensorSource, names: Mapping[str, str]) -> None:
    present = set(source.names())
    missing = [file_name for file_name in names.values() if file_name not in present]
    if not missing:
        return
    near = difflib.get_close_matches(missing[0], sorted(present - set(names.values())), n=1)
    raise CheckpointError(
        explain(
            "Weights are missing from the model's files",
            expected=f"all {len(names)} tensors of the text model",
            got=f"{len(missing)} missing: {_some(missing)}",
            where=f"nearest unused name in the files: `{near[0]}`" if near else None,
            next_step="Nothing is initialised at random: complete the model's files",
        )
    )


def _same(source: TensorSource, name: str, twin: str) -> bool:
    if source.shape(name) != source.shape(twin):
        return False
    cpu = torch.device("cpu")
    first, second = source.load(name, cpu), source.load(twin, cpu)
    return first.dtype == second.dtype and torch.equal(first, second)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:MAX_NAMED])
    return shown + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
