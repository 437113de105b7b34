"""A file's integrity is decided from its header, before any data is touched."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from poros.checkpoint.headers import MAX_HEADER_BYTES, read_header
from poros.errors import CheckpointError

NUM_MUTATIONS = 500


def raw_file(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "BF16") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_good_file_gives_dtypes_shapes_and_positions(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.tensor(3, dtype=torch.int64),
        "c": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "m.safetensors")
    raw = (tmp_path / "m.safetensors").read_bytes()
    assert {name: (e.dtype, e.shape) for name, e in header.tensors.items()} == {
        name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()
    }
    a = header.tensors["a"]
    assert raw[a.begin : a.end] == tensors["a"].numpy().tobytes()
    assert header.metadata == {"format": "pt"}
    assert header.num_bytes == len(raw)
    length = struct.unpack("<Q", raw[:8])[0]
    assert header.sha256 == hashlib.sha256(raw[8 : 8 + length]).hexdigest()


def test_a_truncated_shard_names_the_missing_bytes_and_the_file(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "short.safetensors", {"w": entry([64, 64], 0, 8192)}, b"\0" * 4096)
    with pytest.raises(CheckpointError, match=r"short\.safetensors.*4096 bytes are missing"):
        read_header(path)


def test_one_missing_byte_is_found(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "m.safetensors", {"w": entry([4], 0, 8)}, b"\0" * 7)
    with pytest.raises(CheckpointError, match=r"1 bytes are missing"):
        read_header(path)


def test_bytes_beyond_the_last_tensor_are_refused(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "m.safetensors", {"w": entry([4], 0, 8)}, b"\0" * 9)
    with pytest.raises(CheckpointError, match=r"1 bytes too many"):
        read_header(path)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            "Git LFS pointer.*git lfs pull",
        ),
        (b"<!DOCTYPE html><html><body>503</body></html>", "HTML page"),
        (b"\n  <html>\n<body>Sign in</body></html>", "HTML page"),
        (b"<?xml version='1.0'?><Error>AccessDenied</Error>", "XML page"),
        (b'{"error":"Repository not found"}', "JSON text"),
        (b"PK\x03\x04\x00\x00\x08\x08archive/data.pkl", "pickle archive"),
        (b"GGUF\x03\x00\x00\x00\x01\x00", "GGUF file"),
        (b"", "empty file"),
        (b"abc", "3 bytes"),
    ],
)
def test_a_file_that_is_no_safetensors_file_is_named_for_what_it_is(
    tmp_path: Path, content: bytes, kind: str
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=kind) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_a_header_length_like_text_does_not_condemn_a_good_file(tmp_path: Path) -> None:
    text = json.dumps({"w": entry([4], 0, 8)}).encode()
    path = raw_file(tmp_path / "m.safetensors", text.ljust(0x227B), b"\0" * 8)
    assert path.read_bytes()[:2] == b'{"'
    assert list(read_header(path).tensors) == ["w"]


@pytest.mark.parametrize("length", [0, MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_a_forged_header_length_is_refused_without_allocating(tmp_path: Path, length: int) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(CheckpointError, match=r"a header of 1 to 100000000 bytes"):
        read_header(path)


def test_a_header_longer_than_the_file_is_truncation(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", 1000) + b"{}")
    with pytest.raises(CheckpointError, match=r"998 bytes are missing"):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b'{"w": }', r"m\.safetensors:1:7"),
        (b'{"\xff', "not UTF-8"),
        (b'{"w": ' + b"[" * 200_000, "JSON"),
        (b'{"w": ' + b"9" * 5000 + b"}", "JSON"),
        (b'{"w": 1, "w": 2}', "the key `w` twice"),
        (b"[]", "begins with `{`"),
        (b" {}", "begins with `{`"),
        ({"__metadata__": {"a": 1}}, "__metadata__"),
        ({"w": 3}, "tensor `w`"),
        ({"w": {"dtype": "F32", "shape": [1]}}, "data_offsets"),
        ({"w": entry([4], 0, 8, dtype="Q4_K")}, "Q4_K.*tensor `w`"),
        ({"w": entry([4], 0, 8, dtype=["F32"])}, "dtype"),  # type: ignore[arg-type]
        ({"w": entry([-4], 0, 8)}, "shape"),
        ({"w": entry([True], 0, 2)}, "shape"),
        ({"w": entry([4.0], 0, 8)}, "shape"),  # type: ignore[list-item]
        ({"w": entry([4], -8, 0)}, "data_offsets"),
        ({"w": entry([4], 8, 0)}, "data_offsets"),
        ({"w": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 4, 8]}}, "data_offsets"),
        ({"w": entry([5], 0, 8)}, "10 bytes for BF16"),
        ({"w": entry([2**62, 2**62], 0, 8)}, "a shape of at most"),
        ({"a": entry([4], 0, 8), "b": entry([4], 4, 12)}, "overlaps tensor `a`"),
        ({"a": entry([4], 0, 8), "b": entry([4], 16, 24)}, "gap after tensor `a`"),
        ({"a": entry([4], 8, 16)}, "gap after the header"),
        ({"a": entry([4], 10**15, 10**15 + 8)}, "gap after the header"),
    ],
)
def test_a_forged_or_garbled_header_is_refused(tmp_path: Path, header: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_header(raw_file(tmp_path / "m.safetensors", header, b"\0" * 8))


def test_a_missing_file_a_folder_and_a_dangling_link_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "folder").mkdir()
    for name, got in (("none", "no such file"), ("folder", "a folder"), ("link", "a dangling link")):
        with pytest.raises(CheckpointError, match=got):
            read_header(tmp_path / name)


def test_a_flipped_byte_is_refused_or_read_as_the_reference_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(2, dtype=torch.int16)}, path)
    good = path.read_bytes()
    header_end = 8 + struct.unpack("<Q", good[:8])[0]
    generator = random.Random(0)
    accepted = 0
    for _ in range(NUM_MUTATIONS):
        position = generator.randrange(header_end)
        path.write_bytes(good[:position] + bytes([generator.randrange(256)]) + good[position + 1 :])
        try:
            header = read_header(path)
        except CheckpointError:
            continue
        accepted += 1
        with safe_open(path, "pt") as file:
            assert set(file.keys()) == set(header.tensors)
            assert all(tuple(file.get_slice(n).get_shape()) == e.shape for n, e in header.tensors.items())
    assert 0 < accepted < NUM_MUTATIONS
