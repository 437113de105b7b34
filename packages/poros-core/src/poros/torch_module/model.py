"""A causal language model in Transformers' terms whose blocks stream under autograd.

Shape letters: B batch, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from poros.engine.targets import count_supervised, make_targets
from poros.errors import UserError, explain
from poros.model import LoadedModel
from poros.torch_module.autograd import BlockVisit, ChunkedLoss
from poros.torch_module.inputs import ModuleInputs, read_inputs, refuse_unknown
from poros.torch_module.skeleton import BlockAdapter
from poros.torch_module.visits import BlockVisits, VisitCall

__all__ = ["StreamedBackbone", "StreamedForCausalLM", "TokenRows"]

SEEDS = 2**31


@contextlib.contextmanager
def own_modes(device: torch.device) -> Iterator[None]:
    """Run the model under modes of its own, grad mode apart.

    An autocast around it would change what is computed: dtypes are settings of the model. In inference mode, masks and
    rotary tables that are kept for later forwards would become tensors that no backward may read.
    """
    grad = torch.is_grad_enabled()
    with (
        torch.autocast(device.type, enabled=False),
        torch.inference_mode(False),
        torch.set_grad_enabled(grad),
    ):
        yield


class TokenRows(nn.Module):
    """The token table; a module, so that hooks on a model's embeddings (NEFTune's) see its rows."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__()
        self._model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return (B, T, D) rows of (B, T) ids on the device."""
        ids = input_ids.cpu()
        self._model.embedding.begin(ids.numel())
        hidden = torch.empty(
            *ids.shape,
            self._model.hidden_size,
            dtype=self._model.numerics.compute_dtype,
            device=self._model.device,
        )
        self._model.embedding.write(ids, hidden)
        return hidden


class StreamedBackbone(nn.Module):
    """Everything below the head: token rows, blocks in visits, final norm.

    Args:
        visits: runs the blocks.
    """

    def __init__(self, visits: BlockVisits) -> None:
        super().__init__()
        self._visits = visits
        self._model = visits.model
        self.embed_tokens = TokenRows(visits.model)
        self.norm = visits.model.head.norm
        # With its index, which a device that is named without one lacks.
        self._device = next(self.norm.parameters()).device
        self._adapters: list[BlockAdapter] = []

    def bind_adapters(self, places: nn.ModuleList) -> None:
        """Take the adapters from the skeleton's blocks; once PEFT has injected its layers."""
        kinds = [self._visits.kind(block) for block in range(self._model.num_blocks)]
        self._adapters = [BlockAdapter(*pair) for pair in zip(places, kinds, strict=True)]

    def run_blocks(self, batch: ModuleInputs) -> torch.Tensor:
        """Return the last block's (B, T, D) output, on autograd's tape where adapters are."""
        model, visits = self._model, self._visits
        hidden: torch.Tensor = self.embed_tokens(batch.input_ids)
        positions = None if batch.position_ids is None else batch.position_ids.to(model.device)
        seed = int(torch.randint(SEEDS, ())) if self.training else 0
        states = self._per_block_inputs(batch, hidden)
        for block in range(model.num_blocks):
            kind = visits.kind(block)
            adapter, dropouts = self._adapters[block].read(self._device)
            reads = tuple(spec.name for spec in kind.states.reads)
            given = [states[name] for name in reads]
            if model.per_block is not None:
                name = model.per_block.declared.spec.name
                reads, given = (*reads, name), [*given, states[name][block]]
            call = VisitCall(
                block=block,
                shape=batch.shape,
                positions=positions,
                training=self.training,
                seed=seed,
                dropouts=dropouts,
                has_adapter=bool(adapter),
                reads=reads,
            )
            hidden, *written = BlockVisit.apply(visits, call, hidden, *given, *adapter)
            states |= zip((spec.name for spec in kind.states.writes), written, strict=True)
        return hidden

    def _per_block_inputs(self, batch: ModuleInputs, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the (L, B, T, P) inputs of all blocks by name, empty for families without them."""
        per_block = self._model.per_block
        if per_block is None:
            return {}
        per_block.embedding.begin(batch.input_ids.numel())
        mixed = per_block.inputs(batch.input_ids, hidden.detach())
        return {per_block.declared.spec.name: mixed.permute(2, 0, 1, 3).contiguous()}

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states behind the final norm, in the compute dtype."""
        return self.norm(hidden).to(self._model.numerics.compute_dtype)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **arguments: Any,
    ) -> BaseModelOutputWithPast:
        """Return the normed (B, T, D) states as ``last_hidden_state``."""
        refuse_unknown(arguments, has_positions=position_ids is not None)
        with own_modes(self._model.device):
            batch = read_inputs(self._model, input_ids, attention_mask, position_ids, None)
            return BaseModelOutputWithPast(last_hidden_state=self.normed(self.run_blocks(batch)))


class StreamedForCausalLM(PreTrainedModel, GenerationMixin):
    """What PEFT wraps: see `poros.streamed_model`.

    Args:
        visits: runs the blocks.

    Attributes:
        logits_with_labels: return logits besides a loss; a trainer's `compute_metrics` reads them. They take memory
            that the loss by itself does not.

    Memory:
        Between forward and backward: every block's (B, T, D) input, what families hand on besides, and with labels the
        (B, T, D) gradient of the last output. Logits are (B, T, V) in float32, and are made when they are asked for.
    """

    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _supports_sdpa = True

    def __init__(self, visits: BlockVisits) -> None:
        # A copy: trainers write to it, and the blocks read their own.
        config = copy.deepcopy(visits.model.config)
        config.use_cache = False
        # Another choice would be checked against this class, which holds no experts.
        config._experts_implementation_internal = "eager"
        super().__init__(config)
        self._visits = visits
        self.logits_with_labels = False
        self.model = StreamedBackbone(visits)
        self.lm_head = _make_head(visits.model)
        self.generation_config.use_cache = False

    # ---- forward

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        logits_to_keep: int = 0,
        output_logits: bool | None = None,
        **arguments: Any,
    ) -> CausalLMOutputWithPast:
        """Run the model.

        Args:
            input_ids: (B, T), right-padded.
            attention_mask: (B, T), ones, then zeros.
            position_ids: (B, T); only packed rows need them.
            labels: (B, T), not shifted, -100 where a token is not supervised.
            num_items_in_batch: denominator of the loss; None is this batch's supervised tokens.
            logits_to_keep: logits of this many last positions only; 0 is all.
            output_logits: None is without labels, and with them where `logits_with_labels` says so.

        Raises:
            UserError: an argument that a streamed model cannot honour, or a batch without anything to learn from.
        """
        refuse_unknown(arguments, has_positions=position_ids is not None)
        self._refuse_replicas()
        model = self._visits.model
        with own_modes(model.device):
            batch = read_inputs(model, input_ids, attention_mask, position_ids, labels)
            hidden = self.model.run_blocks(batch)
            loss = None if labels is None else self._loss(hidden, batch, num_items_in_batch)
            wanted = output_logits
            if wanted is None:
                wanted = labels is None or self.logits_with_labels
            logits = self._logits(hidden[:, -logits_to_keep:]) if wanted else None
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def _loss(
        self, hidden: torch.Tensor, batch: ModuleInputs, denominator: torch.Tensor | int | None
    ) -> torch.Tensor:
        count = count_supervised(batch) if denominator is None else int(denominator)
        if count == 0:
            raise UserError(
                explain(
                    "This batch has nothing to learn from",
                    expected="at least one supervised token",
                    got="0",
                    next_step="Look at its labels: -100 is not supervised",
                )
            )
        model = self._visits.model
        targets = make_targets(batch.labels, model.device)
        loss: torch.Tensor = ChunkedLoss.apply(hidden, model.head, targets, count)
        return loss

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head = self._visits.model.head
        normed = self.model.normed(hidden)
        return torch.cat([head.chunk_logits(normed, chunk) for chunk in head.chunks], dim=-1)

    def _refuse_replicas(self) -> None:
        if getattr(self, "_is_replica", False):
            raise UserError(
                explain(
                    "Cannot run a streamed model in `nn.DataParallel`",
                    expected="one device",
                    got="a replica on another one",
                    next_step="Make one GPU visible with `CUDA_VISIBLE_DEVICES`",
                )
            )

    # ---- what trainers ask for

    def get_input_embeddings(self) -> nn.Module:
        """Return the token table's module; it has no ``weight``."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.lm_head

    def activation_checkpointing_enable(self, *arguments: Any, **named: Any) -> None:
        """Do nothing: every block is recomputed in any case."""

    def activation_checkpointing_disable(self) -> None:
        """Do nothing, see `activation_checkpointing_enable`."""

    # The names of the same before Transformers 5.24.
    gradient_checkpointing_enable = activation_checkpointing_enable
    gradient_checkpointing_disable = activation_checkpointing_disable

    @property
    def is_activation_checkpointing(self) -> bool:
        """False: nothing of torch's is switched on."""
        return False

    is_gradient_checkpointing = is_activation_checkpointing

    def enable_input_require_grads(self) -> None:
        """Do nothing: recompute does not depend on it, and backward would go on below the lowest adapter."""

    def disable_input_require_grads(self) -> None:
        """Do nothing, see `enable_input_require_grads`."""

    def save_pretrained(self, *arguments: Any, **named: Any) -> NoReturn:
        """Refuse: call it on the PEFT model."""
        _refuse(
            "save the base of a streamed model",
            "the PEFT model, whose `save_pretrained` writes the adapter",
            "the frozen base, whose files are what they were",
            "Use `poros merge` for a merged model",
        )

    def resize_token_embeddings(self, *arguments: Any, **named: Any) -> NoReturn:
        """Refuse: the tables are the checkpoint's."""
        _refuse(
            "resize the token table of a streamed model",
            "the checkpoint's vocabulary",
            "another size",
            "Add the tokens to the checkpoint first",
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> StreamedForCausalLM:
        """Let adapters through that stay what they are; refuse everything that would move or cast the model."""
        device = self.lm_head.weight.device
        probe = torch.arange(64, dtype=torch.float32, device=device)
        result = fn(probe)
        if result.device != device or result.dtype != probe.dtype or not torch.equal(result, probe):
            _refuse(
                "move or cast a streamed model",
                f"it to stay on {device}, with float32 adapters",
                f"{result.dtype} on {result.device}",
                "Blocks live in the store and come to the device in visits: choose the device and the dtypes with "
                "`device=` and `numerics=` of `poros.streamed_model`",
            )
        super()._apply(fn, recurse)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "hf_device_map" and value is not None:
            _refuse(
                "dispatch a streamed model with accelerate",
                "no `device_map`",
                value,
                "It streams by itself: say how with `plan=` of `poros.streamed_model`",
            )
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Refuse: a copy would hold every block a second time."""
        _refuse(
            "copy a streamed model",
            "one store of its blocks",
            "a second one",
            "A reference model is `disable_adapter()` of the same one, or a second adapter",
        )

    def close(self) -> None:
        """Wait for pending copies and release page locks; the model cannot run afterwards."""
        self._visits.close()


def _make_head(model: LoadedModel) -> nn.Linear:
    """Return the head as a linear layer over the very memory of the loss's vocabulary chunks."""
    rows = sum(chunk.shape[0] for chunk in model.head.chunks)
    hidden = model.hidden_size
    head = nn.Linear(hidden, rows, bias=False, device="meta")
    first = model.head.chunks[0]
    head.weight = nn.Parameter(first.as_strided((rows, hidden), (hidden, 1)), requires_grad=False)
    return head


def _refuse(what: str, expected: str, got: object, next_step: str) -> NoReturn:
    raise UserError(explain(f"Cannot {what}", expected=expected, got=got, next_step=next_step))
