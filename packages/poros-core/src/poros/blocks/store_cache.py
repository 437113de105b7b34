"""A finished store on disk, so that the second start of a model skips quantization."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from poros.blocks.layout import BlockLayout
from poros.blocks.store import BlockStore
from poros.checkpoint import atomic_folder, read_header
from poros.checkpoint.json_files import read_json_object
from poros.checkpoint.source import open_checked, read_tensor
from poros.checkpoint.tensor_file import save_tensors
from poros.errors import CheckpointError, OutputError, explain
from poros.interfaces import TensorSource, WeightFormat

__all__ = ["StoreCache", "store_key"]

FORMAT_VERSION = 1
CONTENTS = "store.json"
TENSOR = "block"
HASH_THREADS = 4


def store_key(
    source: TensorSource,
    weight_format: WeightFormat,
    storage_dtype: torch.dtype,
    device: torch.device,
    layouts: Sequence[BlockLayout],
) -> str:
    """Return a hash of everything that decides a store's bytes.

    The kind of device that quantized belongs to it: CPU and GPU kernels of a format need not round alike.
    """
    kind = device.type
    if device.type == "cuda":
        kind += ".".join(map(str, torch.cuda.get_device_capability(device)))
    facts = [FORMAT_VERSION, source.fingerprint, weight_format.fingerprint(), str(storage_dtype), kind]
    facts += [layout.fingerprint() for layout in layouts]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


class StoreCache:
    """Stores by key under one folder; one safetensors file per block, hashes beside them.

    Several runs may share the folder: a store appears by a rename, and whoever comes second keeps the first one's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, key: str, store: BlockStore, num_blocks: int) -> bool:
        """Read the blocks of a cached store into ``store``, hashes checked; return whether there was a whole one.

        A damaged one is named in a warning and counts as absent.
        """
        folder = self._folder / key
        if not folder.is_dir():
            return False
        try:
            hashes = _read_hashes(folder, num_blocks)
            with ThreadPoolExecutor(HASH_THREADS) as threads:
                for index, good in enumerate(
                    threads.map(lambda i: _read_block(folder, i, store, hashes[i]), range(len(hashes)))
                ):
                    if not good:
                        raise CheckpointError(
                            explain(
                                "A cached block changed",
                                expected="the bytes as written",
                                got="others",
                                where=str(folder / _file_name(index)),
                            )
                        )
        except CheckpointError as error:
            warnings.warn(
                f"The cached store is not used and will be made again: {error}", UserWarning, stacklevel=2
            )
            return False
        return True

    def save(self, key: str, store: BlockStore, num_blocks: int) -> None:
        """Write the blocks of ``store`` under ``key``. A cache that cannot be written costs a warning, never the run.

        Memory: one block.
        """
        try:
            with atomic_folder(self._folder / key, overwrite=True) as folder:
                hashes = []
                for index in range(num_blocks):
                    block = store.block(index).cpu()
                    save_tensors(folder / _file_name(index), {TENSOR: block}, {})
                    hashes.append(_hash(block))
                contents = {"format_version": FORMAT_VERSION, "blocks": hashes}
                (folder / CONTENTS).write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
        except OutputError as error:
            warnings.warn(f"The quantized store is not cached: {error}", UserWarning, stacklevel=2)


def _file_name(index: int) -> str:
    return f"block-{index:05d}.safetensors"


def _hash(block: torch.Tensor) -> str:
    return hashlib.sha256(block.numpy().data).hexdigest()


def _read_hashes(folder: Path, num_blocks: int) -> list[str]:
    contents: dict[str, Any] = read_json_object(folder / CONTENTS)
    hashes = contents.get("blocks")
    if not isinstance(hashes, list) or len(hashes) != num_blocks:
        raise CheckpointError(
            explain(
                "A cached store is incomplete",
                expected=f"hashes of {num_blocks} blocks",
                got=type(hashes).__name__,
                where=str(folder / CONTENTS),
            )
        )
    return hashes


def _read_block(folder: Path, index: int, store: BlockStore, expected_hash: str) -> bool:
    header = read_header(folder / _file_name(index))
    target = store.block(index)
    entry = header.tensors.get(TENSOR)
    if entry is None or entry.num_bytes != target.numel():
        return False
    with open_checked(header) as file:
        block = read_tensor(file, entry, str(header.path))
    if _hash(block) != expected_hash:
        return False
    target.copy_(block)
    return True
