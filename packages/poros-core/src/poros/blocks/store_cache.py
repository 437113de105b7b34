"""A finished store on disk, so that the second start of a model skips quantization."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from poros.blocks.block_file import BLOCK_TENSOR, BlockFile
from poros.blocks.layout import BlockLayout
from poros.blocks.placement import PlacedStore
from poros.blocks.store import BlockStore
from poros.checkpoint import atomic_folder
from poros.checkpoint.atomic import sweep_abandoned
from poros.checkpoint.json_files import read_json_object
from poros.checkpoint.output_folder import check_free_space
from poros.checkpoint.tensor_file import save_tensors
from poros.errors import CheckpointError, OutputError, explain
from poros.interfaces import TensorSource, WeightFormat

__all__ = ["StoreCache", "store_key"]

FORMAT_VERSION = 1
CONTENTS = "store.json"
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
        self._damaged: set[str] = set()

    def load(self, key: str, store: BlockStore, num_blocks: int) -> bool:
        """Read the blocks of a cached store into ``store``, hashes checked; return whether there was a whole one.

        Of blocks on the disk only the headers are read: their hashes are checked when they first come. A damaged store
        is named in a warning and counts as absent.
        """
        sweep_abandoned(self._folder)
        folder = self._folder / key
        if not folder.is_dir():
            return False
        try:
            hashes = _read_hashes(folder, num_blocks)
            _attach(folder, hashes, store)
            with ThreadPoolExecutor(HASH_THREADS) as threads:
                in_memory = [index for index in range(num_blocks) if index not in store.on_disk]
                for _ in threads.map(lambda i: _read_block(folder, i, store, hashes[i]), in_memory):
                    pass
        except CheckpointError as error:
            self._damaged.add(key)
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
            self._write(key, num_blocks, store.block)
        except OutputError as error:
            warnings.warn(f"The quantized store is not cached: {error}", UserWarning, stacklevel=2)

    def fill(
        self,
        key: str,
        store: PlacedStore,
        num_blocks: int,
        make: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Make every block, write it at once, and stream those of the disk tier from here.

        Args:
            key: of the store.
            store: keeps the other blocks.
            make: writes a block's bytes into a vector of zeros.

        Raises:
            OutputError: the folder refuses the store, or has too little room.
            CheckpointError: what was written cannot be read.

        Memory:
            Two blocks besides those that the store keeps.
        """
        needed = sum(layout.num_bytes for layout in store.layouts[:num_blocks])
        check_free_space(self._folder, needed, "the quantized store, part of which is streamed from there")
        scratch = torch.empty(max(store.layouts[i].num_bytes for i in store.on_disk), dtype=torch.uint8)

        def block(index: int) -> torch.Tensor:
            on_disk = index in store.on_disk
            # Between tensors lie zeros, as in every store.
            target = scratch[: store.layouts[index].num_bytes].zero_() if on_disk else store.block(index)
            make(index, target)
            return target

        self._write(key, num_blocks, block)
        folder = self._folder / key
        _attach(folder, _read_hashes(folder, num_blocks), store)

    def _write(self, key: str, num_blocks: int, block: Callable[[int], torch.Tensor]) -> None:
        target = self._folder / key
        try:
            with atomic_folder(target, overwrite=True) as folder:
                hashes = []
                for index in range(num_blocks):
                    content = block(index).cpu()
                    save_tensors(folder / _file_name(index), {BLOCK_TENSOR: content}, {})
                    hashes.append(_hash(content))
                contents = {"format_version": FORMAT_VERSION, "blocks": hashes}
                (folder / CONTENTS).write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
                if key not in self._damaged and target.is_dir():
                    raise _MadeMeanwhileError
        except _MadeMeanwhileError:
            pass


class _MadeMeanwhileError(Exception):
    """Another run was first; its store is the same, and somebody may be about to read it."""


def _attach(folder: Path, hashes: Sequence[str], store: BlockStore) -> None:
    """Open the files of the blocks that stay on the disk."""
    if store.on_disk:
        assert isinstance(store, PlacedStore)
        store.attach(
            {
                index: BlockFile(folder / _file_name(index), store.layouts[index].num_bytes, hashes[index])
                for index in sorted(store.on_disk)
            }
        )


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


def _read_block(folder: Path, index: int, store: BlockStore, expected_hash: str) -> None:
    target = store.block(index)
    file = BlockFile(folder / _file_name(index), target.numel(), expected_hash)
    try:
        if target.device.type == "cpu":
            file.read_into(target)
        else:
            block = torch.empty(target.numel(), dtype=torch.uint8)
            file.read_into(block)
            target.copy_(block)
    finally:
        file.close()
