"""Names and links in other people's files: nothing outside the folder is read, and a hub's cache keeps working."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from poros.checkpoint import SafetensorsSource, load_adapter, load_config, load_run_state, save_run_state
from poros.checkpoint.json_files import read_json_object
from poros.checkpoint.manifest import MANIFEST_FILE, check_manifest, write_manifest
from poros.checkpoint.paths import is_plain_name, is_relative_path, refuse_links_outside
from poros.errors import CheckpointError

NAMES = (
    "../model.safetensors",
    "a/b.safetensors",
    "/etc/model.safetensors",
    "C:\\model.safetensors",
    "a\\b.safetensors",
    "C:model.safetensors",
    ".model.safetensors",
    "..",
    ".",
    "",
    "a\0.safetensors",
    "\x1b[2J.safetensors",
    "a\n.safetensors",
    "\ud800.safetensors",
    "a" * 255 + ".safetensors",
    7,
    None,
    ["a.safetensors"],
)


@pytest.mark.parametrize("name", NAMES, ids=[f"name-{index}" for index in range(len(NAMES))])
def test_a_name_that_could_leave_the_folder_or_obey_a_terminal_is_refused(name: object) -> None:
    assert not is_plain_name(name)


@pytest.mark.parametrize(
    "name", ["model-00001-of-00002.safetensors", "a b.safetensors", "\u00e4.safetensors"]
)
def test_an_ordinary_name_is_plain(name: str) -> None:
    assert is_plain_name(name)


@pytest.mark.parametrize("name", ["a//b", "a/../b", "/a", "a/", "./a", "a/.hidden", "", 1])
def test_a_path_that_is_not_below_the_folder_is_refused(name: object) -> None:
    assert not is_relative_path(name)


def test_a_path_below_the_folder_is_relative() -> None:
    assert is_relative_path("checkpoints/step-000001/state.safetensors")


@pytest.mark.parametrize("name", [name for name in NAMES if isinstance(name, str)])
def test_a_shard_name_is_refused_without_a_look_at_the_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(CheckpointError, match="Unsafe shard name"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "\0", "a" * 5000])
def test_a_manifest_that_names_a_file_outside_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("s")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_manifest(folder)
    content = json.loads((folder / MANIFEST_FILE).read_text())
    content["files"] = {name: {"bytes": 1, "sha256": "0"}}
    (folder / MANIFEST_FILE).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="expected names of files in the folder"):
        check_manifest(folder)


def _model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    return folder


def test_a_weights_file_that_is_a_link_to_another_folder_is_refused(tmp_path: Path) -> None:
    elsewhere = _model(tmp_path / "elsewhere")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(elsewhere / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"link leaves its folder.*elsewhere"):
        SafetensorsSource(folder)


def test_links_inside_the_folder_and_a_linked_folder_are_fine(tmp_path: Path) -> None:
    folder = _model(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "weights.bin")
    (folder / "model.safetensors").symlink_to("weights.bin")
    (tmp_path / "link").symlink_to(folder)
    assert SafetensorsSource(tmp_path / "link").names() == ("w",)


def test_the_links_of_a_hubs_cache_keep_working(tmp_path: Path) -> None:
    repository = tmp_path / "models--owner--name"
    blobs = repository / "blobs"
    _model(repository / "first")
    blobs.mkdir()
    (repository / "first" / "model.safetensors").rename(blobs / "0123abcd")
    snapshot = repository / "snapshots" / "f00d"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123abcd")
    assert SafetensorsSource(snapshot).names() == ("w",)


@pytest.mark.parametrize("target", ["../../../secret", "../../refs/main", "../other/model.safetensors"])
def test_a_link_of_a_hubs_cache_to_anything_but_a_blob_is_refused(tmp_path: Path, target: str) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "f00d"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(target)
    with pytest.raises(CheckpointError, match="A link leaves its folder"):
        refuse_links_outside(snapshot)


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(CheckpointError):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    ("read", "name"),
    [(load_config, "config.json"), (load_adapter, "adapter_config.json")],
    ids=["config", "adapter"],
)
def test_a_json_file_that_is_a_link_to_elsewhere_is_refused(tmp_path: Path, read: object, name: str) -> None:
    (tmp_path / "elsewhere").write_text("{}")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="A link leaves its folder"):
        read(folder)  # type: ignore[operator]


def test_a_checkpoint_whose_file_was_replaced_by_a_link_is_refused(tmp_path: Path) -> None:
    folder = save_run_state(tmp_path / "run", 1, {"w": torch.ones(2)}, {})
    (folder / "state.safetensors").rename(tmp_path / "state")
    (folder / "state.safetensors").symlink_to(tmp_path / "state")
    with pytest.raises(CheckpointError, match="A link leaves its folder"):
        load_run_state(folder)


def test_a_pipe_in_the_place_of_json_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="expected a file, got something else"):
        read_json_object(tmp_path / "config.json")
