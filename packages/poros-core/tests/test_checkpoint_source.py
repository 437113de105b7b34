"""Tensors of a model folder, read one at a time, and which files may make up a folder."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from poros.checkpoint import SafetensorsSource
from poros.checkpoint.headers import DTYPES, read_header
from poros.checkpoint.source import open_checked, read_tensor
from poros.errors import CheckpointError
from poros.interfaces import TensorSource

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"


def sharded(folder: Path) -> dict[str, torch.Tensor]:
    """Write a model of two shards and return its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    first = {"b": torch.randn(3, 5), "a": torch.randn(20_000).to(torch.bfloat16)}
    second = {"c": torch.randint(0, 255, (7,), dtype=torch.uint8)}
    save_file(first, folder / "model-00001-of-00002.safetensors")
    save_file(second, folder / "model-00002-of-00002.safetensors")
    names = dict.fromkeys(first, "model-00001-of-00002.safetensors")
    names |= dict.fromkeys(second, "model-00002-of-00002.safetensors")
    write_index(folder, names)
    return first | second


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_every_dtype_is_read_bit_for_bit_as_safetensors_reads_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {}
    for code, dtype in DTYPES.items():
        raw = torch.randint(0, 2 if dtype is torch.bool else 100, (4, 2 * dtype.itemsize), dtype=torch.uint8)
        if code != "F8_E8M0":  # older safetensors cannot write it
            tensors[code] = raw.view(dtype)
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}
    save_file(tensors, tmp_path / "model.safetensors")
    expected = load_file(tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    for name, tensor in expected.items():
        got = source.load(name, CPU)
        assert got.dtype == tensor.dtype == source.dtype(name)
        assert got.shape == tensor.shape == source.shape(name)
        assert got.view(-1).view(torch.uint8).tolist() == tensor.view(-1).view(torch.uint8).tolist()


def test_shards_are_read_through_the_index(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    source: TensorSource = SafetensorsSource(tmp_path)
    assert set(source.names()) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(source.load(name, CPU), tensor)


def test_loaded_tensors_do_not_share_memory_with_the_file(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    source = SafetensorsSource(tmp_path)
    source.load("b", CPU).zero_()
    assert torch.equal(source.load("b", CPU), tensors["b"])


def test_an_absent_tensor_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    source = SafetensorsSource(tmp_path)
    for read in (source.shape, lambda name: source.load(name, CPU)):
        with pytest.raises(CheckpointError, match=r"tensor `nope`"):
            read("nope")


def test_a_hub_cache_made_of_links_works(tmp_path: Path) -> None:
    tensors = sharded(tmp_path / "real")
    snapshot = tmp_path / "snapshots" / "0123"
    blobs = tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted((tmp_path / "real").iterdir())):
        shutil.move(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    assert torch.equal(SafetensorsSource(snapshot).load("a", CPU), tensors["a"])


def test_an_index_that_names_a_missing_shard_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors.*no such file"):
        SafetensorsSource(tmp_path)


def test_a_shard_that_is_a_dangling_link_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"a dangling link"):
        SafetensorsSource(tmp_path)


def test_a_truncated_shard_is_refused_before_any_tensor_is_read(tmp_path: Path) -> None:
    sharded(tmp_path)
    shard = tmp_path / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"00001-of-00002.*10 bytes are missing"):
        SafetensorsSource(tmp_path)


def test_a_shard_that_shrinks_after_the_check_is_an_error_not_garbage(tmp_path: Path) -> None:
    sharded(tmp_path)
    source = SafetensorsSource(tmp_path)
    shard = tmp_path / "model-00001-of-00002.safetensors"
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 10)
    with pytest.raises(CheckpointError, match=r"changed since it was checked.*00001-of-00002"):
        source.load("a", CPU)


def test_a_read_past_the_end_is_an_error_not_garbage(tmp_path: Path) -> None:
    sharded(tmp_path)
    header = read_header(tmp_path / "model-00001-of-00002.safetensors")
    entry = dataclasses.replace(header.tensors["b"], begin=header.num_bytes - 30, end=header.num_bytes + 30)
    with open_checked(header) as file, pytest.raises(CheckpointError, match=r"30 are missing \(tensor `b`\)"):
        read_tensor(file, entry, "tensor `b`")


def test_a_tensor_absent_from_its_shard_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    content = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    write_index(tmp_path, content | {"model.norm.weight": "model-00002-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match=r"tensor `model\.norm\.weight` in `model-00002"):
        SafetensorsSource(tmp_path)


def test_a_tensor_that_the_index_forgot_is_listed(tmp_path: Path) -> None:
    sharded(tmp_path)
    content = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    del content["b"]
    write_index(tmp_path, content)
    assert "b" in SafetensorsSource(tmp_path).names()


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"c": torch.zeros(7), "b": torch.zeros(3, 5)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor `b` once"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "sub\\model.safetensors",
        "C:model.safetensors",
        "..safetensors",
        "model.bin",
        "model\0.safetensors",
        "",
        7,
        None,
    ],
)
def test_a_shard_name_that_leaves_the_folder_is_refused(tmp_path: Path, name: object) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    write_index(tmp_path, {"a": name})
    with pytest.raises(CheckpointError, match=r"Unsafe shard name"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_an_index_without_tensors_is_refused(tmp_path: Path, weight_map: object) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=r"weight_map"):
        SafetensorsSource(tmp_path)


def test_a_garbled_index_is_refused_with_line_and_column(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{\n "weight_map": {,}\n}')
    with pytest.raises(CheckpointError, match=r"index\.json:2:17"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    ("file_name", "message"),
    [
        ("pytorch_model.bin", "pickled weights.*save_pretrained"),
        ("pytorch_model.bin.index.json", "pickled weights"),
        ("model.gguf", "GGUF"),
        ("adapter_config.json", "an adapter.*base model"),
        ("model-00001-of-00002.safetensors", "without an index"),
        ("README.md", "got none"),
    ],
)
def test_a_folder_without_safetensors_weights_says_what_it_holds(
    tmp_path: Path, file_name: str, message: str
) -> None:
    (tmp_path / file_name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=message):
        SafetensorsSource(tmp_path)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no such folder"):
        SafetensorsSource(tmp_path / "none")


def test_the_fingerprint_survives_a_copy(tmp_path: Path) -> None:
    sharded(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two", copy_function=shutil.copyfile)
    assert SafetensorsSource(tmp_path / "one").fingerprint == SafetensorsSource(tmp_path / "two").fingerprint


@pytest.mark.parametrize("position", [0, 9_999, 19_999])
def test_the_fingerprint_changes_with_a_value_at_head_middle_or_tail(tmp_path: Path, position: int) -> None:
    tensor = torch.zeros(20_000)
    save_file({"w": tensor}, tmp_path / "model.safetensors")
    before = SafetensorsSource(tmp_path).fingerprint
    tensor[position] = 1
    save_file({"w": tensor}, tmp_path / "model.safetensors")
    assert SafetensorsSource(tmp_path).fingerprint != before


def test_the_fingerprint_changes_with_any_value_of_a_small_tensor(tmp_path: Path) -> None:
    prints = set()
    for position in range(6):
        tensor = torch.zeros(6)
        tensor[position] = 1
        save_file({"w": tensor}, tmp_path / "model.safetensors")
        prints.add(SafetensorsSource(tmp_path).fingerprint)
    assert len(prints) == 6


def test_the_fingerprint_changes_with_names_shapes_and_file_names(tmp_path: Path) -> None:
    prints = []
    for number, (tensors, file_name) in enumerate(
        [
            ({"w": torch.zeros(2, 3)}, "model.safetensors"),
            ({"v": torch.zeros(2, 3)}, "model.safetensors"),
            ({"w": torch.zeros(3, 2)}, "model.safetensors"),
            ({"w": torch.zeros(2, 3)}, "other.safetensors"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file(tensors, folder / file_name)
        if file_name != "model.safetensors":
            write_index(folder, dict.fromkeys(tensors, file_name))
        prints.append(SafetensorsSource(folder).fingerprint)
    assert len(set(prints)) == 4
