"""The cached store: found again, keyed by what decides its bytes, and never trusted when damaged."""

import json
from pathlib import Path

import pytest
import torch

from poros.blocks.layout import make_layout
from poros.blocks.store import HostStore, checksum
from poros.blocks.store_cache import StoreCache, store_key
from poros.interfaces import TensorSpec
from poros_quant import Bf16Bitwise, Nf4

LAYOUT = make_layout([TensorSpec(name="w", dtype=torch.uint8, shape=(1000,))])
CPU = torch.device("cpu")


class Source:
    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint


def filled(seed: int) -> HostStore:
    store = HostStore([LAYOUT, LAYOUT], pin=False)
    generator = torch.Generator().manual_seed(seed)
    for index in range(2):
        block = store.block(index)
        block.copy_(torch.randint(0, 256, block.shape, generator=generator, dtype=torch.uint8))
    return store


def test_a_saved_store_is_read_back_byte_for_byte(tmp_path: Path) -> None:
    store = filled(1)
    StoreCache(tmp_path).save("key", store, 2)
    again = HostStore([LAYOUT, LAYOUT], pin=False)
    assert StoreCache(tmp_path).load("key", again, 2)
    assert checksum(again) == checksum(store)


def test_an_unknown_key_is_not_found(tmp_path: Path) -> None:
    StoreCache(tmp_path).save("key", filled(1), 2)
    assert not StoreCache(tmp_path).load("other", filled(2), 2)


def test_a_second_run_that_saves_the_same_key_leaves_a_whole_store(tmp_path: Path) -> None:
    StoreCache(tmp_path).save("key", filled(1), 2)
    StoreCache(tmp_path).save("key", filled(1), 2)
    assert StoreCache(tmp_path).load("key", filled(2), 2)


def _truncate(folder: Path) -> None:
    path = folder / "block-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _flip_a_bit(folder: Path) -> None:
    path = folder / "block-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def _drop_a_block(folder: Path) -> None:
    (folder / "block-00001.safetensors").unlink()


def _forge_contents(folder: Path) -> None:
    (folder / "store.json").write_text(json.dumps({"blocks": ["x"]}))


def _drop_contents(folder: Path) -> None:
    (folder / "store.json").unlink()


@pytest.mark.parametrize("damage", [_truncate, _flip_a_bit, _drop_a_block, _forge_contents, _drop_contents])
def test_a_damaged_store_is_named_and_not_used(tmp_path: Path, damage: object) -> None:
    StoreCache(tmp_path).save("key", filled(1), 2)
    damage(tmp_path / "key")  # type: ignore[operator]
    with pytest.warns(UserWarning, match="cached store is not used"):
        assert not StoreCache(tmp_path).load("key", filled(2), 2)


def test_a_cache_that_cannot_be_written_costs_a_warning_only(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.warns(UserWarning, match="not cached"):
        StoreCache(blocked).save("key", filled(1), 2)


def test_the_key_depends_on_source_format_dtype_and_layout() -> None:
    other = make_layout([TensorSpec(name="w", dtype=torch.uint8, shape=(1001,))])
    keys = {
        store_key(Source("a"), Nf4(), torch.bfloat16, CPU, [LAYOUT]),  # type: ignore[arg-type]
        store_key(Source("b"), Nf4(), torch.bfloat16, CPU, [LAYOUT]),  # type: ignore[arg-type]
        store_key(Source("a"), Bf16Bitwise(), torch.bfloat16, CPU, [LAYOUT]),  # type: ignore[arg-type]
        store_key(Source("a"), Nf4(), torch.float32, CPU, [LAYOUT]),  # type: ignore[arg-type]
        store_key(Source("a"), Nf4(), torch.bfloat16, CPU, [other]),  # type: ignore[arg-type]
    }
    assert len(keys) == 5
