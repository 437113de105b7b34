"""Which safetensors files make up a model folder, and which tensor lies in which."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from poros.checkpoint.headers import FileHeader, read_header
from poros.checkpoint.json_files import read_json_object
from poros.checkpoint.paths import is_plain_name, refuse_links_outside
from poros.errors import CheckpointError, explain

__all__ = ["read_shards"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
WEIGHT_FILES = ("*.safetensors", INDEX_FILE)


def read_shards(folder: Path) -> Mapping[str, FileHeader]:
    """Read the checked headers of a model folder's weight files, by file name in sorted order.

    ``model.safetensors`` wins over an index where both exist, as in Transformers.

    Raises:
        CheckpointError: no safetensors weights, a damaged file, a link to a file outside the folder, an index that
            names a missing or unsafe file, a tensor that is absent from the file that the index names, or a tensor in
            two files.
    """
    if not folder.is_dir():
        raise CheckpointError(
            explain("Cannot read a model", expected="a folder", got="no such folder", where=str(folder))
        )
    refuse_links_outside(folder, WEIGHT_FILES)
    if (folder / SINGLE_FILE).exists() or (folder / SINGLE_FILE).is_symlink():
        return {SINGLE_FILE: read_header(folder / SINGLE_FILE)}
    index_path = folder / INDEX_FILE
    if not index_path.is_file():
        raise CheckpointError(_no_weights(folder))
    weight_map = _read_index(index_path)
    headers = {}
    for file_name in sorted(set(weight_map.values())):
        path = folder / file_name
        if not path.exists():
            raise CheckpointError(
                explain(
                    "A shard is missing",
                    expected=f"the file `{file_name}`, which {INDEX_FILE} names",
                    got="a dangling link" if path.is_symlink() else "no such file",
                    where=str(folder),
                    next_step="Complete the download or the copy of the model",
                )
            )
        headers[file_name] = read_header(path)
    _check_index(index_path, weight_map, headers)
    return headers


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            explain(
                "Cannot use an index", expected="a `weight_map` with tensors", got=weight_map, where=str(path)
            )
        )
    for name, file_name in weight_map.items():
        if not (is_plain_name(file_name) and file_name.endswith(".safetensors")):
            raise CheckpointError(
                explain(
                    "Unsafe shard name in an index",
                    expected="a plain name of a .safetensors file in the model folder",
                    got=f"{file_name!r:.80}",
                    where=f"{path}, tensor `{name}`",
                )
            )
    return weight_map


def _check_index(path: Path, weight_map: Mapping[str, str], headers: Mapping[str, FileHeader]) -> None:
    for name, file_name in weight_map.items():
        if name not in headers[file_name].tensors:
            raise CheckpointError(
                explain(
                    "A tensor is absent from its shard",
                    expected=f"tensor `{name}` in `{file_name}`",
                    got=f"{len(headers[file_name].tensors)} other tensors there",
                    where=str(path),
                    next_step="Index and shards come from different saves: download or save the model again",
                )
            )
    holder: dict[str, str] = {}
    for file_name, header in headers.items():
        for name in header.tensors:
            if name in holder:
                raise CheckpointError(
                    explain(
                        "A tensor lies in two shards",
                        expected=f"tensor `{name}` once",
                        got=f"`{holder[name]}` and `{file_name}`",
                        where=str(path.parent),
                        next_step="Save the model again: the two copies may differ",
                    )
                )
            holder[name] = file_name


def _no_weights(folder: Path) -> str:
    """Say what the folder holds instead of safetensors weights."""
    present = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in present if name.endswith((".bin", ".pt", ".pth", ".bin.index.json"))]
    stray = [name for name in present if name.endswith(".safetensors")]
    got, next_step = "none", "Name the folder that holds the weights"
    if "adapter_config.json" in present:
        got, next_step = "an adapter (adapter_config.json)", "Name the base model's folder instead"
    elif stray:
        got = f"{', '.join(stray[:4])} without an index"
        next_step = f"Complete the model with its {INDEX_FILE}"
    elif pickles:
        got = f"only pickled weights ({', '.join(pickles[:4])}), which can run code when they are read"
        next_step = (
            'Convert them once, where you trust them: `python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{folder}', dtype='auto').save_pretrained('NEW_FOLDER')\"`, and copy the tokenizer"
        )
    elif any(name.endswith(".gguf") for name in present):
        got, next_step = (
            "a GGUF file",
            "Convert it to safetensors first (Transformers reads it with `gguf_file=`)",
        )
    return explain(
        "Cannot read a model",
        expected=f"`{SINGLE_FILE}` or `{INDEX_FILE}`",
        got=got,
        where=str(folder),
        next_step=next_step,
    )
