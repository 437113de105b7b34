"""Gemma 4's blocks, called one by one, against Transformers' own model loop: the difference is 0.0."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from poros.interfaces import StateSpec
from poros.parity.random_model import RandomSource
from poros_arch_gemma.architectures import Gemma4
from poros_arch_gemma.gemma4_cases import gemma4_dense, gemma4_shared

BATCH, TOKENS = 2, 11
CPU = torch.device("cpu")


def stock_model(config: Any, dtype: torch.dtype) -> nn.Module:
    """Transformers' own model with random weights, no two tensors alike."""
    model: nn.Module = Gemma4().build(config)
    model = type(model)(model.config).to(dtype).eval().requires_grad_(False)
    state = model.state_dict()
    source = RandomSource({name: tuple(tensor.shape) for name, tensor in state.items()}, 3, CPU)
    for name, tensor in state.items():
        tensor.copy_(source.load(name, CPU))
    text: Any = model.get_submodule("model")
    text.rotary_emb = type(text.rotary_emb)(
        model.config
    )  # loading a model does not round its frequencies either
    return model


@pytest.fixture
def input_ids() -> torch.Tensor:
    return torch.randint(1, 131, (BATCH, TOKENS), generator=torch.Generator().manual_seed(5))


def per_layer_inputs(model: nn.Module, input_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor | None:
    """What `poros.engine.per_block` computes from the declaration, over the stock model's tensors."""
    architecture = Gemma4()
    declared = architecture.per_block_inputs(model)
    if declared is None:
        return None
    table: Any = model.get_submodule(declared.table)
    rows = table.weight[input_ids] * torch.tensor(declared.scale).to(hidden.dtype)
    modules = {path: model.get_submodule(path) for path in declared.modules}
    return architecture.mix_per_block_inputs(architecture.build(model.config), modules, hidden, rows)


@pytest.mark.parametrize("make_config", [gemma4_dense, gemma4_shared], ids=["dense", "shared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loop_over_blocks_is_the_model_loop(
    make_config: Callable[[], Any], dtype: torch.dtype, input_ids: torch.Tensor
) -> None:
    architecture = Gemma4()
    model = stock_model(make_config(), dtype)
    config: Any = model.config
    context = architecture.context(model, batch=BATCH, tokens=TOKENS, device=CPU, dtype=dtype)
    scale = architecture.embedding_scale(config, dtype)
    with torch.no_grad():
        hidden = model.get_submodule("model.embed_tokens").weight[input_ids] * scale  # type: ignore[index, operator]
        inputs = per_layer_inputs(model, input_ids, hidden)
        states: dict[str, torch.Tensor] = {}
        for index, block in enumerate(model.get_submodule("model.layers")):  # type: ignore[arg-type]
            own = {} if inputs is None else {"per_layer_input": inputs[:, :, index]}
            hidden, written = architecture.call_block_with_states(
                block, hidden, context, config.layer_types[index], {**states, **own}
            )
            states |= written
        ours = model.get_submodule("model.norm")(hidden)
        theirs = model.model(input_ids=input_ids, use_cache=False).last_hidden_state  # type: ignore[operator, union-attr]
    assert torch.equal(ours, theirs)


def test_the_inputs_of_all_layers_are_what_transformers_computes(input_ids: torch.Tensor) -> None:
    model = stock_model(gemma4_shared(), torch.bfloat16)
    text: Any = model.get_submodule("model")
    with torch.no_grad():
        hidden = text.embed_tokens(input_ids)
        theirs = text.project_per_layer_inputs(hidden, text.get_per_layer_inputs(input_ids, None))
        ours = per_layer_inputs(model, input_ids, hidden)
    assert ours is not None
    assert ours.shape == (BATCH, TOKENS, 6, 12)
    assert torch.equal(ours, theirs)


def states_of(model: nn.Module) -> list[tuple[list[str], list[str]]]:
    blocks: Any = model.get_submodule("model.layers")
    found = [Gemma4().block_states(block) for block in blocks]
    return [([s.name for s in own.reads], [s.name for s in own.writes]) for own in found]


def test_the_last_own_keys_and_values_of_each_type_are_read_by_every_later_block_of_it() -> None:
    sliding = ["sliding_attention.key", "sliding_attention.value"]
    full = ["full_attention.key", "full_attention.value"]
    assert states_of(Gemma4().build(gemma4_shared())) == [
        ([], []),
        ([], sliding),
        ([], full),
        (sliding, []),
        (sliding, []),
        (full, []),
    ]


def test_states_have_the_heads_of_their_layer_type() -> None:
    blocks: Any = Gemma4().build(gemma4_shared(num_key_value_heads=2)).get_submodule("model.layers")
    assert Gemma4().block_states(blocks[3]).reads[0] == StateSpec(name="sliding_attention.key", sizes=(2, 16))
    assert Gemma4().block_states(blocks[5]).reads[1] == StateSpec(name="full_attention.value", sizes=(2, 32))


def test_keys_and_values_that_nobody_reads_are_not_handed_on() -> None:
    """Transformers marks the last block of each layer type even where nothing is shared."""
    assert states_of(Gemma4().build(gemma4_dense())) == [([], [])] * 5
