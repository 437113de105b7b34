"""The integrity of a safetensors file, checked from its header before any tensor data is touched.

Layout of a file: 8 bytes little-endian header length N, N bytes of JSON, then the data. A reader that maps the file
into memory finds a truncated shard only when it is killed or reads garbage, so sizes are compared first.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from poros.checkpoint.json_files import parse_json
from poros.errors import CheckpointError, explain

__all__ = ["DTYPES", "FileHeader", "TensorEntry", "read_header"]

# The reference implementation refuses longer headers; a forged length must not decide how much memory is taken.
MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8
# What an array library can address; beyond, sizes would overflow where tensors are made.
MAX_DIMENSIONS = 64
MAX_TENSOR_BYTES = 2**63 - 1

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}

# What a file whose header length is absurd begins with (lower case), what it is, and what to do about it.
LOOKALIKES = (
    (b"version https://git-lfs", "a Git LFS pointer", "Fetch the real file with `git lfs pull`"),
    (b"<!doctype", "an HTML page", "Download the file again: the server answered with a web page"),
    (b"<html", "an HTML page", "Download the file again: the server answered with a web page"),
    (b"<?xml", "an XML page", "Download the file again: the server answered with an error page"),
    (b'{"', "a JSON text", "Download the file again: the server answered with a message"),
    (
        b"pk\x03\x04",
        "a pickle archive of PyTorch",
        "Convert it with `save_pretrained` in a trusted environment",
    ),
    (b"gguf", "a GGUF file", "Convert it to safetensors first"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """Where one tensor lies. ``begin`` and ``end`` are absolute byte positions in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's data."""
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True, slots=True)
class FileHeader:
    """The checked header of one safetensors file.

    Attributes:
        path: the file.
        num_bytes: size of the whole file.
        sha256: of the header's bytes, hexadecimal.
        tensors: by name, in file order.
        metadata: the ``__metadata__`` strings.
    """

    path: Path
    num_bytes: int
    sha256: str
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


def read_header(path: Path) -> FileHeader:
    """Read and check the header of a safetensors file.

    Raises:
        CheckpointError: the file is missing, empty, truncated, longer than its header says, something else
            altogether (Git LFS pointer, HTML page, pickle, ...), or its header is malformed or contradicts itself.

    Memory:
        The header only, at most 100 MB whatever length the file claims.
    """
    num_bytes, raw = _read_raw(path)
    if not raw.startswith(b"{"):
        raise _malformed(path, "a header that begins with `{`", repr(raw[:16]))
    content = parse_json(raw, f"the header of {path}")
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _malformed(path, "`__metadata__` to map strings to strings", repr(metadata)[:80])
    data_start = LENGTH_BYTES + len(raw)
    tensors = {name: _entry(path, name, value, data_start) for name, value in content.items()}
    ordered = sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end))
    _check_extents(path, ordered, data_start, num_bytes)
    return FileHeader(
        path=path,
        num_bytes=num_bytes,
        sha256=hashlib.sha256(raw).hexdigest(),
        tensors=dict(ordered),
        metadata=metadata,
    )


def _read_raw(path: Path) -> tuple[int, bytes]:
    """Return the file's size and its header's bytes."""
    if not path.is_file():
        got = "a dangling link" if path.is_symlink() else "a folder" if path.is_dir() else "no such file"
        raise CheckpointError(
            explain("Cannot read weights", expected="a safetensors file", got=got, where=str(path))
        )
    try:
        with path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            start = file.read(64)
            if num_bytes < LENGTH_BYTES:
                raise _malformed(
                    path, "at least 8 bytes", f"{num_bytes} bytes" if num_bytes else "an empty file"
                )
            length = int.from_bytes(start[:LENGTH_BYTES], "little")
            if not 0 < length <= MAX_HEADER_BYTES:
                _reject_lookalike(path, start, num_bytes)
                raise _malformed(path, f"a header of 1 to {MAX_HEADER_BYTES} bytes", f"a length of {length}")
            if LENGTH_BYTES + length > num_bytes:
                raise _truncated(path, LENGTH_BYTES + length, num_bytes, "for the header alone")
            file.seek(LENGTH_BYTES)
            return num_bytes, file.read(length)
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror or error}.") from error


def _reject_lookalike(path: Path, start: bytes, num_bytes: int) -> None:
    begin = start.lstrip().lower()
    for prefix, kind, next_step in LOOKALIKES:
        if begin.startswith(prefix):
            raise CheckpointError(
                explain(
                    "Cannot read weights",
                    expected="a safetensors file",
                    got=f"{kind} of {num_bytes} bytes",
                    where=str(path),
                    next_step=next_step,
                )
            )


def _entry(path: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    """Check one tensor's description by itself."""
    where = f"tensor `{name:.200}`"
    if not isinstance(value, dict):
        raise _malformed(path, "an object with dtype, shape and data_offsets", repr(value)[:80], where)
    dtype_name, shape, offsets = (value.get(key) for key in ("dtype", "shape", "data_offsets"))
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise _malformed(path, f"a dtype among {', '.join(DTYPES)}", repr(dtype_name)[:80], where)
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        expected = f"a shape of at most {MAX_DIMENSIONS} non-negative integers"
        raise _malformed(path, expected, f"{shape!r:.80}", where)
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _malformed(path, "data_offsets [begin, end] with 0 <= begin <= end", f"{offsets!r:.80}", where)
    # Sizes beside a zero must fit, too: strides are made from them.
    if dtype.itemsize * math.prod(max(size, 1) for size in shape) > MAX_TENSOR_BYTES:
        raise _malformed(path, f"a shape of at most {MAX_TENSOR_BYTES} bytes", f"{shape!r:.80}", where)
    needed = dtype.itemsize * math.prod(shape)
    if offsets[1] - offsets[0] != needed:
        raise _malformed(
            path, f"{needed} bytes for {dtype_name} {shape}", f"data_offsets {offsets!r:.80}", where
        )
    begin, end = (data_start + offset for offset in offsets)
    return TensorEntry(dtype=dtype, shape=tuple(shape), begin=begin, end=end)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_extents(
    path: Path, ordered: list[tuple[str, TensorEntry]], data_start: int, num_bytes: int
) -> None:
    """Check that the tensors cover the data exactly once, and that the data is all there."""
    position, previous = data_start, "the header"
    for name, entry in ordered:
        if entry.begin != position:
            what = "overlaps" if entry.begin < position else "leaves a gap after"
            raise _malformed(
                path,
                f"tensor `{name}` to begin at byte {position}",
                f"byte {entry.begin}, which {what} {previous}",
            )
        position, previous = entry.end, f"tensor `{name}`"
    if num_bytes < position:
        raise _truncated(path, position, num_bytes, f"{len(ordered)} tensors")
    if num_bytes > position:
        raise _malformed(path, f"{position} bytes", f"{num_bytes}: {num_bytes - position} bytes too many")


def _truncated(path: Path, expected: int, got: int, where: str) -> CheckpointError:
    return CheckpointError(
        explain(
            f"Truncated weights file {path}",
            expected=f"{expected} bytes",
            got=f"{got} bytes: {expected - got} bytes are missing",
            where=where,
            next_step="Download or copy the file again",
        )
    )


def _malformed(path: Path, expected: str, got: str, where: str | None = None) -> CheckpointError:
    return CheckpointError(
        explain(
            f"Damaged weights file {path}",
            expected=expected,
            got=got,
            where=where,
            next_step="Download or save the file again",
        )
    )
