"""Tensors of a pretrained model folder, read one at a time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch

from poros.checkpoint.headers import FileHeader, TensorEntry
from poros.checkpoint.shards import read_shards
from poros.errors import CheckpointError, explain

__all__ = ["SafetensorsSource", "open_checked", "read_tensor"]

# Bytes hashed at the head, the middle and the tail of every tensor.
SAMPLE_BYTES = 4096


class SafetensorsSource:
    """The `TensorSource` of a folder with ``model.safetensors`` or its shards and index.

    Every file's integrity is checked when the source is made. Data is read with plain reads into fresh memory, not
    through a memory map: a file that shrinks while it is mapped kills the process, and mapped pages count as
    the process' memory until the kernel takes them back. Files are opened for one read at a time, so there is
    nothing to close, and threads may read side by side.

    Attributes:
        folder: the model folder.
        fingerprint: a sha256 that stays the same when the folder is copied and changes with the weights. It covers
            the name, size and header of every file and 4 KiB at the head, middle and tail of every tensor.
            Another checkpoint of the same shapes differs in these; an edit by hand of a few bytes elsewhere does not.
            Hashing everything would read the whole model at every start.

    Raises:
        CheckpointError: no safetensors weights, or a damaged file or index.

    Memory:
        One tensor at a time.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        headers = read_shards(self.folder)
        self._places: dict[str, tuple[FileHeader, TensorEntry]] = {
            name: (header, entry) for header in headers.values() for name, entry in header.tensors.items()
        }
        self.fingerprint = _fingerprint(headers)

    def names(self) -> Sequence[str]:
        """Return every tensor name, in file order."""
        return tuple(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading its data."""
        return self._place(name)[1].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's stored dtype without reading its data."""
        return self._place(name)[1].dtype

    def load(self, name: str, device: torch.device) -> torch.Tensor:
        """Read one tensor to ``device`` in its stored dtype.

        Raises:
            CheckpointError: the tensor is absent, or its file changed or failed since the source was made.
        """
        header, entry = self._place(name)
        with open_checked(header) as file:
            return read_tensor(file, entry, f"tensor `{name}` of {header.path}").to(device)

    def _place(self, name: str) -> tuple[FileHeader, TensorEntry]:
        place = self._places.get(name)
        if place is None:
            raise CheckpointError(
                explain(
                    "A tensor is missing",
                    expected=f"tensor `{name}`",
                    got=f"{len(self._places)} other tensors",
                    where=str(self.folder),
                )
            )
        return place


@contextmanager
def open_checked(header: FileHeader) -> Iterator[BinaryIO]:
    """Open a file whose header was checked, and check that its size is still the same.

    Raises:
        CheckpointError: it cannot be read, or its size changed.
    """
    try:
        with open(header.path, "rb", buffering=0) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes != header.num_bytes:
                raise CheckpointError(
                    explain(
                        "A weights file changed since it was checked",
                        expected=f"{header.num_bytes} bytes",
                        got=f"{num_bytes} bytes",
                        where=str(header.path),
                        next_step="Do not write a model while it is read",
                    )
                )
            yield file
    except OSError as error:
        raise CheckpointError(f"Cannot read {header.path}: {error.strerror or error}.") from error


def read_tensor(file: BinaryIO, entry: TensorEntry, where: str) -> torch.Tensor:
    """Read one tensor of a checked file into fresh CPU memory.

    Raises:
        CheckpointError: the file ends early; ``where`` names it.
    """
    flat = torch.empty(entry.num_bytes, dtype=torch.uint8)
    _read_into(file, entry.begin, memoryview(flat.numpy().data), where)
    return flat.view(entry.dtype).reshape(entry.shape)


def _fingerprint(headers: Mapping[str, FileHeader]) -> str:
    digest = hashlib.sha256()
    for file_name, header in headers.items():
        digest.update(f"{file_name}\0{header.num_bytes}\0{header.sha256}\0".encode())
        with open_checked(header) as file:
            for position, size in _samples(header):
                buffer = bytearray(size)
                _read_into(file, position, memoryview(buffer), str(header.path))
                digest.update(buffer)
    return digest.hexdigest()


def _samples(header: FileHeader) -> Iterator[tuple[int, int]]:
    """Yield (position, size) of the bytes of each tensor that the fingerprint covers."""
    for entry in header.tensors.values():
        if entry.num_bytes <= 3 * SAMPLE_BYTES:
            yield entry.begin, entry.num_bytes
        else:
            middle = (entry.begin + entry.end - SAMPLE_BYTES) // 2
            for position in (entry.begin, middle, entry.end - SAMPLE_BYTES):
                yield position, SAMPLE_BYTES


def _read_into(file: BinaryIO, position: int, view: memoryview, where: str) -> None:
    """Fill ``view`` from ``position`` on; the kernel may deliver large reads in pieces."""
    done = 0
    file.seek(position)
    while done < len(view):
        count = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(
                explain(
                    "A weights file ended early",
                    expected=f"{len(view)} bytes at {position}",
                    got=f"{done} bytes: {len(view) - done} are missing",
                    where=where,
                    next_step="Do not write a model while it is read",
                )
            )
        done += count
