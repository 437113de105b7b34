"""One safetensors file that Poros itself writes and reads."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from poros.checkpoint.headers import read_header
from poros.checkpoint.source import open_checked, read_tensor
from poros.errors import NonFiniteError

__all__ = ["check_finite", "load_tensors", "save_tensors"]


def check_finite(tensors: Mapping[str, torch.Tensor], what: str) -> None:
    """Refuse tensors that hold NaN or infinity: a run that diverged must not look like a success.

    Raises:
        NonFiniteError: naming the first such tensor and how many of its values are not finite.
    """
    for name, tensor in tensors.items():
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        finite = torch.isfinite(tensor)
        if not finite.all():
            raise NonFiniteError(
                f"{what} is not saved: expected finite values, got {int((~finite).sum())} of {tensor.numel()} "
                f"NaN or infinite (tensor `{name}`). Lower the learning rate and resume from the last checkpoint."
            )


def save_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors from any device to one safetensors file, the same bytes for the same content.

    Raises:
        OSError: the disk is full or refuses the write.
    """
    on_host = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    try:
        save_file(on_host, path, metadata=dict(metadata or {}) or None)
    except SafetensorError as error:
        # The library hides the system's error number in its text.
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number.group(1))
        raise OSError(code, os.strerror(code), str(path)) from error
    if metadata is not None and len(metadata) > 1:
        _sort_metadata(path)


def _sort_metadata(path: Path) -> None:
    """Put the metadata in order: the library writes it in one that changes from process to process."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length)
        if len(text) == length:  # as the library writes it, but for the order
            file.seek(8)
            file.write(text)


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of a safetensors file into fresh CPU memory.

    Raises:
        CheckpointError: the file is missing, damaged or truncated.
    """
    header = read_header(path)
    with open_checked(header) as file:
        return {
            name: read_tensor(file, entry, f"tensor `{name}` of {path}")
            for name, entry in header.tensors.items()
        }
