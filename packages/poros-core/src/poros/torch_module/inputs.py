"""What trainers hand to a model's forward, checked and brought to what a pass over the blocks needs.

Shape letters: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from poros.engine.embedding import check_token_ids
from poros.engine.packed import packed_positions
from poros.engine.targets import IGNORE_INDEX
from poros.errors import UserError, explain
from poros.model import LoadedModel

__all__ = ["ModuleInputs", "read_inputs", "refuse_unknown"]

# Arguments of Transformers' models that change nothing here where they hold one of these values.
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "use_cache": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "return_dict": (None, True),
    "past_key_values": (None,),
    "inputs_embeds": (None,),
}
# What only caches read, and what this package's own forward makes no use of.
IGNORED = frozenset({"cache_position", "is_first_iteration"})
# What a collator of packed rows says besides `position_ids`, for attention kernels that read it in this form.
RESTATED = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})


@dataclass(frozen=True, slots=True)
class ModuleInputs:
    """A checked batch; `MicroBatch` is its protocol.

    Attributes:
        input_ids: (B, T) on the CPU.
        labels: (B, T) on the CPU, -100 everywhere without labels.
        position_ids: (B, T) on the CPU where rows are packed, else None.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        return int(self.input_ids.shape[0]), int(self.input_ids.shape[1])


def read_inputs(
    model: LoadedModel,
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    labels: torch.Tensor | None,
) -> ModuleInputs:
    """Return the batch on the CPU, where rows are gathered.

    A mask of right-padded rows needs nothing: under a causal mask no token attends to a later one, so what stands
    behind a row's end reaches none of its tokens. Any other mask is refused.

    Raises:
        UserError: no ids, an id without a row, left padding, positions that are neither plain nor packed.
    """
    if input_ids is None or input_ids.dim() != 2:
        got = "none" if input_ids is None else f"{tuple(input_ids.shape)}"
        raise UserError(
            explain("Cannot run a streamed model", expected="`input_ids` of shape (batch, tokens)", got=got)
        )
    ids = input_ids.cpu()
    mask = None if attention_mask is None else attention_mask.cpu()
    if mask is not None:
        _check_mask(mask, tuple(ids.shape))
    own = torch.full_like(ids, IGNORE_INDEX) if labels is None else labels.cpu()
    if own.shape != ids.shape:
        raise UserError(
            explain("Bad `labels`", expected=f"shape {tuple(ids.shape)}, not shifted", got=tuple(own.shape))
        )
    # A copy: the recompute reads it again, and autograd does not see what the caller writes into it meanwhile.
    positions = None if position_ids is None else position_ids.cpu().expand_as(ids).clone()
    if positions is not None and _is_plain(positions, mask):
        positions = None
    batch = ModuleInputs(ids, own, positions)
    check_token_ids(batch, model.num_tokens)
    packed_positions(batch, model.architecture)
    return batch


def _check_mask(mask: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(mask.shape) != shape:
        raise UserError(
            explain(
                "Bad `attention_mask`",
                expected=f"shape {shape}",
                got=tuple(mask.shape),
                next_step="Masks of a family's own follow from its config; packed rows need `position_ids`",
            )
        )
    kept = mask != 0
    if bool((kept[:, 1:] & ~kept[:, :-1]).any()):
        raise UserError(
            explain(
                "Bad `attention_mask`",
                expected="right-padded rows: ones, then zeros",
                got="a zero before a one",
                next_step="Set the tokenizer's `padding_side` to `right`",
            )
        )


def _is_plain(positions: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether every token stands at its own index; what padding carries does not matter."""
    same = positions == torch.arange(positions.shape[1])
    return bool((same if mask is None else same | (mask == 0)).all())


def refuse_unknown(arguments: Mapping[str, Any], *, has_positions: bool) -> None:
    """Refuse an argument that a streamed model would otherwise pass over in silence.

    Args:
        arguments: by name, those that the forward does not declare.
        has_positions: `position_ids` are given, which say where samples of a row begin.

    Raises:
        UserError: it asks for something that is not offered.
    """
    for name, value in arguments.items():
        if value is None or name in IGNORED or (has_positions and name in RESTATED):
            continue
        if name == "token_type_ids" and not bool(
            torch.as_tensor(value).any()
        ):  # Gemma's text tokens are zeros
            continue
        if not any(value is harmless for harmless in HARMLESS.get(name, ())):
            raise UserError(
                explain(
                    "Cannot run a streamed model",
                    expected="`input_ids`, `attention_mask`, `position_ids`, `labels`, `num_items_in_batch`, "
                    "`logits_to_keep` and `output_logits`",
                    got=f"`{name}`",
                    next_step="Leave it out"
                    + (
                        ", or generate with `use_cache=False`"
                        if name in ("past_key_values", "use_cache")
                        else ""
                    ),
                )
            )
