"""States that blocks hand on besides hidden states: who writes them, and which descriptions are refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from poros.errors import ArchitectureError
from poros.interfaces import BlockStates, StateSpec
from poros.model import _state_writers
from poros.precision import attention_backend

KEY = StateSpec(name="key", sizes=(2, 8))
WRITER, READER, PLAIN = BlockStates(writes=(KEY,)), BlockStates(reads=(KEY,)), BlockStates()


def writers(*states: BlockStates) -> dict[str, int]:
    architecture: Any = SimpleNamespace(name="mine")
    return _state_writers(architecture, states)


def test_every_state_has_the_block_that_writes_it() -> None:
    assert writers(PLAIN, WRITER, READER, PLAIN, READER) == {"key": 1}


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ((READER, WRITER, READER), "block 0 reads .*key.* and no earlier block writes it"),
        ((WRITER, BlockStates(reads=(StateSpec(name="key", sizes=(2, 16)),))), "block 1 reads"),
        ((WRITER, WRITER, READER), "blocks 0 and 1 both write `key`"),
        ((WRITER, PLAIN), r"no block reads \['key'\]"),
    ],
    ids=["before-it-is-written", "another-shape", "two-writers", "nobody-reads"],
)
def test_a_wrong_description_is_refused_by_name(states: tuple[BlockStates, ...], words: str) -> None:
    with pytest.raises(ArchitectureError, match=f"`mine` describes its blocks' states wrongly.*{words}"):
        writers(*states)


def test_heads_that_flash_attention_does_not_take_run_in_the_math_backend() -> None:
    cuda = torch.device("cuda")
    found = [
        attention_backend(cuda, torch.bfloat16, masked=False, head_dim=head_dim) for head_dim in (256, 512)
    ]
    assert found == [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
