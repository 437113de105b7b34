"""The reference: an unpatched Transformers + PEFT loop on the same weights and data.

It shares no product code with the engine: Transformers' own forward over ordinary linear layers that hold the
dequantized weights, PEFT's own injection, one AdamW state per tensor. Agreement is up to cross-implementation rounding.

Shape letters: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from peft import get_peft_model, set_peft_model_state_dict
from peft.optimizers import create_loraplus_optimizer
from torch import nn
from transformers import AutoModelForCausalLM, get_scheduler

from poros.adapters import base_linears
from poros.blocks.kinds import plain_tensors
from poros.engine.targets import IGNORE_INDEX
from poros.engine.template import BlockTemplate
from poros.interfaces import MicroBatch
from poros.parity.case_run import CaseRun, case_optimizer
from poros.precision import attention_backend

__all__ = ["ReferenceRun", "ReferenceStep", "dense_model"]


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """One step of the reference: per micro-batch losses and gradients by PEFT's saved key."""

    losses: torch.Tensor
    gradients: dict[str, torch.Tensor]


def dense_model(run: CaseRun) -> nn.Module:
    """Return Transformers' model with the run's weights dequantized into ordinary linear layers.

    Args:
        run: a *resident* case run; its blocks are read where they lie.
    """
    model, dtype = run.model, run.model.numerics.compute_dtype
    meta = model.meta
    with torch.device("meta"):
        dense = AutoModelForCausalLM.from_config(meta.config, attn_implementation="sdpa").to(dtype)
    state: dict[str, torch.Tensor] = {}
    kind_of = {block: kind for kind in model.kinds for block in kind.blocks}
    for index in range(model.num_blocks):
        template = BlockTemplate(
            kind_of[index],
            model.store.block(index),
            run.engine._region,
            model.architecture,
            dtype,
            workspace=None,
            shared=(model.config,),
        )
        prefix = f"{meta.parts.blocks}.{index}."
        for path, linear in base_linears(template.module):
            state[f"{prefix}{path}.weight"] = linear.dequantize().to(dtype)
            bias = linear.bias_in_compute_dtype()
            if bias is not None:
                state[f"{prefix}{path}.bias"] = bias
        bound = template.module.state_dict()
        for name, _ in plain_tensors(template.module):
            state[prefix + name] = bound[name].to(dtype)
    state[f"{meta.parts.embedding}.weight"] = model.embedding.table.to(model.device, dtype)
    state[f"{meta.parts.head}.weight"] = torch.cat(model.head.chunks).to(model.device, dtype)
    for name, parameter in model.head.norm.named_parameters():
        state[f"{meta.parts.final_norm}.{name}"] = parameter.to(dtype)
    if model.per_block is not None:
        state |= {name: tensor.to(model.device, dtype) for name, tensor in model.per_block.tensors().items()}
    dense.load_state_dict(state, strict=True, assign=True)
    _restore_buffers(dense, model.device)
    return dense.requires_grad_(False)


def _restore_buffers(dense: nn.Module, device: torch.device) -> None:
    """Give values to the buffers that no checkpoint holds: rotary frequencies and embedding scales."""
    rotary = dense.get_submodule("model.rotary_emb")
    with torch.device("cpu"):
        dense.model.rotary_emb = type(rotary)(config=dense.config).to(device)  # type: ignore[union-attr]
    for module in dense.modules():
        if "embed_scale" in module._buffers:
            module._buffers["embed_scale"] = torch.tensor(module.scalar_embed_scale, device=device)
    unset = [name for name, buffer in dense.named_buffers() if buffer.is_meta]
    assert not unset, f"buffers without values: {unset}"


class ReferenceRun:
    """A PEFT model that starts from the same adapter weights as ``run`` and trains by itself."""

    def __init__(self, run: CaseRun) -> None:
        self._run = run
        self._dtype = run.model.numerics.compute_dtype
        self._device = run.model.device
        self.model = get_peft_model(dense_model(run), run.model.meta.lora_config, autocast_adapter_dtype=True)
        tensors = {name: view.clone() for name, view in run.model.adapter_tensors().items()}
        outcome = set_peft_model_state_dict(self.model, tensors)
        assert not outcome.unexpected_keys
        self.model.train()
        self._named = {
            name.replace(".default.", "."): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        parameters = [p.data.float() for p in self._named.values()]
        for parameter, value in zip(self._named.values(), parameters, strict=True):
            parameter.data = value
        chosen = case_optimizer(run.case)
        self._max_grad_norm = chosen.max_grad_norm or float("inf")
        # Without a ratio of its own this is one AdamW with one rate.
        self._optimizer = create_loraplus_optimizer(
            self.model,
            torch.optim.AdamW,
            lr=chosen.learning_rate,
            loraplus_lr_ratio=chosen.lora_plus_ratio,
            loraplus_weight_decay=chosen.weight_decay,
            betas=(chosen.beta1, chosen.beta2),
            eps=chosen.eps,
        )
        self._scheduler = get_scheduler(
            chosen.schedule,
            self._optimizer,
            num_warmup_steps=chosen.warmup_steps,
            num_training_steps=run.case.num_steps * 2,
        )

    def step(self, step: int) -> ReferenceStep:
        """Run one optimizer step of the ordinary loop."""
        batches = self._run.micro_batches(step)
        denominator = sum(int((b.labels[:, 1:] != IGNORE_INDEX).sum()) for b in batches)
        self._optimizer.zero_grad()
        losses = []
        for batch in batches:
            loss = self._loss(batch) / denominator
            loss.backward()
            losses.append(loss.detach())
        gradients = {name: p.grad.clone() for name, p in self._named.items() if p.grad is not None}
        nn.utils.clip_grad_norm_(self._named.values(), self._max_grad_norm)
        self._optimizer.step()
        self._scheduler.step()
        return ReferenceStep(torch.stack(losses), gradients)

    def _loss(self, batch: MicroBatch) -> torch.Tensor:
        backend = attention_backend(self._device, self._dtype, masked=False, head_dim=0)
        with (
            torch.autocast(self._device.type, torch.bfloat16, enabled=self._dtype == torch.bfloat16),
            torch.nn.attention.sdpa_kernel([backend, torch.nn.attention.SDPBackend.MATH]),
        ):
            logits = self.model(input_ids=batch.input_ids.to(self._device), use_cache=False).logits
        shifted = logits[:, :-1].float().reshape(-1, logits.shape[-1])
        labels = batch.labels[:, 1:].reshape(-1).to(self._device)
        return F.cross_entropy(shifted, labels, ignore_index=IGNORE_INDEX, reduction="sum")

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the adapter weights by PEFT's saved key."""
        return {name: p.detach() for name, p in self._named.items()}
