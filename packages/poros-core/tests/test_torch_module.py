"""The drop-in module: what autograd, PEFT and trainers find in it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, PeftModelForCausalLM
from torch import nn
from transformers import AutoModelForCausalLM

import poros
from poros.errors import ConfigError, UserError

MakeModule = Callable[..., Any]

# float32 on both sides; chunked head and fused LoRA products round in other places. The contract's bound.
FLOAT32_TOLERANCE = 1e-5

BATCH, TOKENS, PADDED = 2, 9, 3


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Two rows, the second right-padded; the first token of each row and all padding are not supervised."""
    ids = torch.randint(0, 60, (BATCH, TOKENS), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, -PADDED:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not different


# ---- what it is


def test_adapters_are_float32_parameters_under_pefts_names_and_nothing_else_is_trainable(
    make_module: MakeModule,
) -> None:
    module = make_module(poros.LoraSettings(rank=4, targets=("q_proj",), blocks=(1, 3)))
    assert isinstance(module, PeftModelForCausalLM)
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    assert set(trainable) == {
        f"base_model.model.model.layers.{block}.self_attn.q_proj.{group}.default.weight"
        for block in (1, 3)
        for group in ("lora_A", "lora_B")
    }
    assert {p.dtype for p in trainable.values()} == {torch.float32}
    assert all(p.is_leaf for p in trainable.values())


def test_no_parameter_is_a_meta_tensor_and_blocks_have_no_frozen_parameters(make_module: MakeModule) -> None:
    frozen = {name: p for name, p in make_module().named_parameters() if not p.requires_grad}
    assert set(frozen) == {"base_model.model.model.norm.weight", "base_model.model.lm_head.weight"}
    assert not any(p.is_meta for p in frozen.values())


def test_the_head_is_the_memory_that_the_loss_reads(make_module: MakeModule) -> None:
    base = make_module().get_base_model()
    assert base.lm_head.weight.data_ptr() == base._visits.model.head.chunks[0].data_ptr()


# ---- what it computes


def test_logits_are_those_of_stock_transformers_and_peft(
    make_module: MakeModule, qwen3_model: Path, tmp_path: Path
) -> None:
    module = make_module(quantization="bf16_bitwise")
    module.save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(qwen3_model, dtype=torch.float32)
    stock = PeftModel.from_pretrained(stock, tmp_path)
    given = {name: tensor for name, tensor in batch().items() if name != "labels"}
    real = given["attention_mask"].bool()
    with torch.no_grad():
        difference = (module(**given).logits - stock(**given).logits)[real].abs().max()
    assert difference < FLOAT32_TOLERANCE


def test_loss_and_gradients_are_those_of_stock_transformers_and_peft(
    make_module: MakeModule, qwen3_model: Path, tmp_path: Path
) -> None:
    module = make_module(quantization="bf16_bitwise")
    module.save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(qwen3_model, dtype=torch.float32)
    stock = PeftModel.from_pretrained(stock, tmp_path, is_trainable=True)
    losses = []
    for model in (module, stock):
        loss = model(**batch()).loss
        loss.backward()
        losses.append(loss.detach())
    assert (losses[0] - losses[1]).abs() < FLOAT32_TOLERANCE
    for name, expected in gradients(stock).items():
        found = dict(module.named_parameters())[name].grad
        assert (found - expected).abs().max() < FLOAT32_TOLERANCE, name


def test_gradients_through_logits_are_those_of_the_loss(make_module: MakeModule) -> None:
    module, given = make_module(), batch()
    module(**given).loss.backward()
    expected = gradients(module)
    module.zero_grad(set_to_none=True)
    logits = module(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten()).backward()
    for name, found in gradients(module).items():
        assert (found - expected[name]).abs().max() < FLOAT32_TOLERANCE, name


def test_logits_are_made_when_there_are_no_labels_or_when_asked_for(make_module: MakeModule) -> None:
    module, given = make_module(), batch()
    assert module(**given).logits is None
    assert module(**given, output_logits=True).logits.shape == (BATCH, TOKENS, 64)
    module.get_base_model().logits_with_labels = True
    assert module(**given).logits.shape == (BATCH, TOKENS, 64)
    assert module(input_ids=given["input_ids"], logits_to_keep=1).logits.shape == (BATCH, 1, 64)


def test_what_stands_in_the_padding_changes_no_bit(make_module: MakeModule) -> None:
    module, given = make_module(), batch()
    loss = module(**given).loss
    given["input_ids"] = given["input_ids"].masked_fill(given["attention_mask"] == 0, 7)
    assert torch.equal(module(**given).loss, loss)


def test_the_denominator_is_num_items_in_batch(make_module: MakeModule) -> None:
    module, given = make_module(), batch()
    count = int((given["labels"][:, 1:] != -100).sum())
    mean = module(**given).loss
    assert torch.equal(module(**given, num_items_in_batch=torch.tensor(count)).loss, mean)
    assert module(**given, num_items_in_batch=2 * count).loss < 0.6 * mean


def test_packed_rows_are_told_by_their_positions(make_module: MakeModule) -> None:
    module = make_module()
    one, two = torch.arange(1, 6)[None], torch.arange(11, 15)[None]
    alone = torch.cat([module(input_ids=ids).logits for ids in (one, two)], dim=1)
    positions = torch.cat([torch.arange(5), torch.arange(4)])[None]
    packed = module(input_ids=torch.cat([one, two], dim=1), position_ids=positions).logits
    assert (packed - alone).abs().max() < FLOAT32_TOLERANCE


def test_positions_that_are_overwritten_after_a_forward_change_nothing(make_module: MakeModule) -> None:
    module = make_module()
    ids = torch.arange(1, 9)[None]
    first, second = (torch.tensor([[*range(cut), *range(8 - cut)]]) for cut in (2, 5))

    def gradients(*buffers: torch.Tensor) -> list[torch.Tensor]:
        module.zero_grad()
        losses = []
        for buffer, values in zip(buffers, (first, second), strict=True):
            buffer.copy_(values)
            labels = ids.masked_fill(values == 0, -100)
            losses.append(module(input_ids=ids, position_ids=buffer, labels=labels).loss)
        sum(losses).backward()
        return [p.grad.clone() for p in module.parameters() if p.grad is not None]

    one_buffer = torch.empty_like(first)
    for own, shared in zip(
        gradients(first.clone(), second.clone()), gradients(one_buffer, one_buffer), strict=True
    ):
        assert torch.equal(own, shared)


def test_packed_forwards_alive_at_once_keep_their_own_positions(make_module: MakeModule) -> None:
    module, ids = make_module(), torch.arange(1, 9)[None]
    splits = [torch.cat([torch.arange(n), torch.arange(8 - n)])[None] for n in (3, 5)]

    def loss(positions: torch.Tensor) -> torch.Tensor:
        return module(
            input_ids=ids, position_ids=positions, labels=ids.masked_fill(positions == 0, -100)
        ).loss

    for positions in splits:
        loss(positions).backward()
    expected = gradients(module)
    module.zero_grad(set_to_none=True)
    for alive in [loss(positions) for positions in splits]:
        alive.backward()
    assert_equal(gradients(module), expected)


def test_a_forward_in_inference_mode_leaves_nothing_that_training_cannot_read(
    make_module: MakeModule,
) -> None:
    module = make_module()
    with torch.inference_mode():
        loss = module(**batch()).loss
    assert torch.equal(module(**batch()).loss, loss)
    module(**batch()).loss.backward()
    other = make_module()
    other(**batch()).loss.backward()
    assert_equal(gradients(module), gradients(other))


def test_an_outer_autocast_changes_no_bit(make_module: MakeModule) -> None:
    module, given = make_module(), batch()
    loss = module(**given).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module(**given).loss, loss)


def test_generate_answers_as_stock_transformers_does(
    make_module: MakeModule, qwen3_model: Path, tmp_path: Path
) -> None:
    module = make_module(quantization="bf16_bitwise").eval()
    module.save_pretrained(tmp_path)
    stock = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(qwen3_model, dtype=torch.float32), tmp_path
    )
    prompt = {name: batch()[name][:1] for name in ("input_ids", "attention_mask")}
    found, expected = (m.generate(**prompt, max_new_tokens=4, do_sample=False) for m in (module, stock))
    assert torch.equal(found, expected)


# ---- gradients and their life


def test_zero_grad_lets_gradients_go_and_the_next_backward_makes_fresh_ones(make_module: MakeModule) -> None:
    module = make_module()
    module(**batch()).loss.backward()
    first = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    kept = {name: grad.clone() for name, grad in first.items()}
    module.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in module.parameters())
    module(**batch(1)).loss.backward()
    assert_equal(first, kept)  # nothing of ours wrote into what was let go
    assert all(p.grad is not first[name] for name, p in module.named_parameters() if p.requires_grad)


def test_gradients_own_their_memory(make_module: MakeModule) -> None:
    module = make_module()
    module(**batch()).loss.backward()
    storages = [p.grad.untyped_storage().data_ptr() for p in module.parameters() if p.requires_grad]
    assert len(set(storages)) == len(storages)


def test_two_forwards_alive_at_once_give_the_gradients_of_one_after_the_other(
    make_module: MakeModule,
) -> None:
    module = make_module()
    for seed in (0, 1):
        module(**batch(seed)).loss.backward()
    expected = gradients(module)
    module.zero_grad(set_to_none=True)
    first, second = module(**batch(0)).loss, module(**batch(1)).loss
    first.backward()
    second.backward()
    assert_equal(gradients(module), expected)


def test_a_reference_forward_between_forward_and_backward_changes_no_bit(make_module: MakeModule) -> None:
    module = make_module(poros.LoraSettings(rank=4, dropout=0.3))
    torch.manual_seed(1)
    module(**batch()).loss.backward()
    expected = gradients(module)
    module.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss = module(**batch()).loss
    with torch.no_grad(), module.disable_adapter():
        module(**batch(1))
    loss.backward()
    assert_equal(gradients(module), expected)


def test_the_recompute_repeats_dropout_and_leaves_the_generator_alone(make_module: MakeModule) -> None:
    lora = poros.LoraSettings(rank=4, dropout=0.5)
    found = []
    for plan in ({"num_slots": 2}, {"residency": "resident"}):
        module = make_module(lora, **plan)
        torch.manual_seed(1)
        loss = module(**batch()).loss
        state = torch.get_rng_state()
        loss.backward()
        assert torch.equal(torch.get_rng_state(), state)
        found.append(gradients(module))
        assert not torch.equal(module(**batch()).loss, loss)  # the next forward has masks of its own
    assert_equal(*found)


def test_dropout_that_a_trainer_switches_off_in_the_modules_is_off(make_module: MakeModule) -> None:
    module = make_module(poros.LoraSettings(rank=4, dropout=0.5))
    expected = module.eval()(**batch()).loss
    module.train()
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0
    assert torch.equal(module(**batch()).loss, expected)


def test_a_second_backward_is_refused_unless_the_graph_is_kept(make_module: MakeModule) -> None:
    module = make_module()
    loss = module(**batch()).loss
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    once = gradients(module)
    module.zero_grad(set_to_none=True)
    loss = module(**batch()).loss
    loss.backward(retain_graph=True)
    loss.backward()
    assert_equal(gradients(module), {name: 2 * grad for name, grad in once.items()})


def test_a_gradient_of_gradients_is_refused(make_module: MakeModule) -> None:
    module = make_module()
    parameter = next(p for p in module.parameters() if p.requires_grad)
    (grad,) = torch.autograd.grad(module(**batch()).loss, parameter, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        grad.sum().backward()


def test_an_optimizer_step_between_forward_and_backward_is_refused(make_module: MakeModule) -> None:
    module = make_module()
    loss = module(**batch()).loss
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_backward_ends_at_the_lowest_adapted_block(make_module: MakeModule) -> None:
    module = make_module(poros.LoraSettings(rank=4, blocks=(2,)))
    slots = module.get_base_model()._visits.slots
    loss = module(**batch()).loss
    slots.take_statistics()
    asked = []
    real = slots.prefetch
    slots.prefetch = lambda block, slot: (asked.append(block), real(block, slot))
    module(**batch()).loss.backward()
    assert loss.requires_grad
    # Forward needs all of 0, 1, 2, 3 again; backward ends at 2, and only its guess goes one further.
    assert asked[: asked.index(3) + 1] == [0, 1, 2, 3]
    assert set(asked[asked.index(3) + 1 :]) <= {1}


# ---- PEFT's own doings


def test_disable_adapter_gives_the_base_model(make_module: MakeModule, qwen3_model: Path) -> None:
    module, given = make_module(quantization="bf16_bitwise"), {"input_ids": batch()["input_ids"]}
    stock = AutoModelForCausalLM.from_pretrained(qwen3_model, dtype=torch.float32)
    with torch.no_grad(), module.disable_adapter():
        difference = (module(**given).logits - stock(**given).logits).abs().max()
    assert difference < FLOAT32_TOLERANCE
    assert (module(**given).logits - stock(**given).logits).abs().max() > FLOAT32_TOLERANCE


def test_a_second_adapter_is_its_own(make_module: MakeModule) -> None:
    module, given = make_module(), batch()
    loss = module(**given).loss
    module.add_adapter("ref", module.peft_config["default"])
    module.set_adapter("ref")
    fresh = module(**given).loss
    with torch.no_grad(), module.disable_adapter():
        base = module(**given).loss
    assert torch.equal(fresh, base)  # its lora_B is zero
    module.set_adapter("default")
    assert torch.equal(module(**given).loss, loss)


def test_a_saved_adapter_loads_into_another_streamed_model(make_module: MakeModule, tmp_path: Path) -> None:
    module, other = make_module(), make_module()
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    module.save_pretrained(tmp_path)
    other.load_adapter(tmp_path, "default", is_trainable=True)
    assert torch.equal(other(**batch()).loss, module(**batch()).loss)


def test_merging_is_refused_and_the_way_named(make_module: MakeModule) -> None:
    with pytest.raises(UserError, match=r"merge an adapter into a streamed model.*`poros merge`"):
        make_module().merge_and_unload()


def test_an_adapter_of_another_rank_is_refused(make_module: MakeModule) -> None:
    from dataclasses import replace

    module = make_module()
    config = replace(module.peft_config["default"], r=8)
    config._custom_modules = module.peft_config["default"]._custom_modules
    module.add_adapter("wide", config)
    module.set_adapter("wide")
    with pytest.raises(UserError, match=r"rank 4, as the model was opened with, got .*rank 8 in `wide`"):
        module(**batch())


def test_two_active_adapters_are_refused(make_module: MakeModule) -> None:
    module = make_module()
    module.add_adapter("more", module.peft_config["default"])
    module.base_model.set_adapter(["default", "more"])
    with pytest.raises(UserError, match="one active adapter"):
        module(**batch())


# ---- what would move, cast or misread it


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.to("meta"),
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.to(torch.float64),
        lambda m: m.to_empty(device="cpu"),
        lambda m: m.get_base_model().half(),
    ],
    ids=["meta", "half", "bfloat16", "float64", "empty", "base"],
)
def test_moving_and_casting_are_refused_and_change_nothing(make_module: MakeModule, move: Any) -> None:
    module = make_module()
    expected = module(**batch()).loss
    with pytest.raises(UserError, match=r"Cannot move or cast a streamed model.*device="):
        move(module)
    assert torch.equal(module(**batch()).loss, expected)


def test_moving_it_to_where_it_is_changes_nothing(make_module: MakeModule) -> None:
    module = make_module()
    before = dict(module.named_parameters())
    assert module.to(module.device) is module
    assert all(p is before[name] for name, p in module.named_parameters())


def test_a_device_map_is_refused(make_module: MakeModule) -> None:
    from accelerate import dispatch_model

    base = make_module().get_base_model()
    with pytest.raises(UserError, match="dispatch a streamed model with accelerate"):
        dispatch_model(base, {"": "cpu"}, force_hooks=True)


def test_layers_that_accelerate_has_hooked_are_refused(make_module: MakeModule) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    module = make_module()
    layer = module.base_model.model.model.layers[1].self_attn.q_proj
    add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu"))
    with pytest.raises(UserError, match="dispatched by accelerate"):
        module(**batch())


def test_parameters_that_a_device_map_has_taken_away_are_refused(make_module: MakeModule) -> None:
    module = make_module()
    layer = module.base_model.model.model.layers[1].self_attn.q_proj.lora_A["default"]
    layer.weight = nn.Parameter(layer.weight.to("meta"))
    with pytest.raises(UserError, match=r"float32 on cpu, got torch.float32 on meta .*q_proj.*`device_map`"):
        module(**batch())


def test_a_copy_is_refused_and_the_reference_named(make_module: MakeModule) -> None:
    with pytest.raises(UserError, match=r"Cannot copy a streamed model.*`disable_adapter\(\)`"):
        copy.deepcopy(make_module())


def test_a_data_parallel_replica_is_refused(make_module: MakeModule) -> None:
    module = make_module()
    module.get_base_model()._is_replica = True
    with pytest.raises(UserError, match=r"nn\.DataParallel.*CUDA_VISIBLE_DEVICES"):
        module(**batch())


def test_several_processes_are_refused(make_module: MakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="`WORLD_SIZE` is 2"):
        make_module()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"plan": poros.Plan(head="host")}, "plan.head"),
        ({"plan": poros.Plan(activations="host")}, "plan.activations"),
        ({"plan": poros.Plan(resident_blocks=1, kept_blocks=1)}, "plan.kept_blocks"),
        ({"numerics": poros.Numerics(blocks="compiled")}, "numerics.blocks"),
        ({"numerics": poros.Numerics(neftune_alpha=5.0)}, "numerics.neftune_alpha"),
    ],
)
def test_what_only_the_engine_can_do_is_refused(
    qwen3_model: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        poros.streamed_model(qwen3_model, device="cpu", **settings)


def test_left_padding_is_refused(make_module: MakeModule) -> None:
    given = batch()
    given["attention_mask"] = given["attention_mask"].flip(1)
    with pytest.raises(UserError, match=r"right-padded.*padding_side"):
        make_module()(**given)


@pytest.mark.parametrize(
    "argument",
    [{"past_key_values": object()}, {"use_cache": True}, {"output_hidden_states": True}, {"surprise": 1}],
    ids=lambda argument: next(iter(argument)),
)
def test_an_argument_that_would_be_passed_over_is_refused(
    make_module: MakeModule, argument: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=f"got `{next(iter(argument))}`"):
        make_module()(input_ids=batch()["input_ids"], **argument)


def test_a_token_without_a_row_is_named(make_module: MakeModule) -> None:
    with pytest.raises(UserError, match=r"not in the model's vocabulary.*64"):
        make_module()(input_ids=torch.tensor([[1, 64]]))


def test_a_batch_without_supervised_tokens_is_refused(make_module: MakeModule) -> None:
    given = batch()
    given["labels"] = torch.full_like(given["labels"], -100)
    with pytest.raises(UserError, match="nothing to learn from"):
        make_module()(**given)


def test_the_base_cannot_be_saved_or_resized(make_module: MakeModule, tmp_path: Path) -> None:
    base = make_module().get_base_model()
    with pytest.raises(UserError, match="save the base"):
        base.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="resize"):
        base.resize_token_embeddings(65)
