"""Whether a model will stop where its training rows end (base models with a chat template often do not)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from poros_cli.tokenizer import stop_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["stop_token_warnings"]

EMBEDDING = "embed_tokens.weight"
OTHER_TOWERS = ("vision", "visual", "audio")
# Rows that stand for the vocabulary; read one by one.
SAMPLED_ROWS = 512
# How far from the median row's norm, in standard deviations that the median deviation stands for, a row is an outlier.
# The farthest of SmolLM2-135M's 49,152 rows lies at 4.9, its trained turn tokens below 1 (2026-11-30).
NORM_OUTLIER = 8.0
# Tokens that were never seen keep the row that they began with, and they often began alike: SmolLM2's unused special
# tokens have the cosine 1.000 to each other; its turn tokens, which were trained, at most 0.993 to them (2026-11-30).
SAME_ROW = 0.9995
SAME_ROWS = 2
NORMAL = 1.4826  # a normal distribution's standard deviation over its median absolute deviation


def stop_token_warnings(
    folder: Path, tokenizer: PreTrainedTokenizerBase, token_id: int | None
) -> Iterator[str]:
    """Yield sentences about the token that ends the training rows; nothing where it looks right or cannot be judged.

    Args:
        folder: the model's files; the embedding is looked at where its weights are there.
        tokenizer: of the model.
        token_id: last supervised token of the first row; None where truncation cut it off.
    """
    if token_id is None:
        return
    name = tokenizer.convert_ids_to_tokens(token_id)
    stops = stop_token_ids(folder)
    own = " or ".join(f"`{tokenizer.convert_ids_to_tokens(stop)}`" for stop in stops)
    # Of a token that is not even the tokenizer's own end, the data's report has warned.
    if stops and token_id not in stops and token_id == tokenizer.eos_token_id:
        yield (
            f"the rows end with `{name}` ({token_id}), but the model's own files stop at {own}: a base model may never "
            f"have learnt `{name}`, and generation does not stop at it. Use an instruction-tuned model, a "
            f"`rows.template` that ends turns with {own}, or set `eos_token_id` where you generate"
        )
    reason = _looks_untrained(folder, tokenizer, token_id)
    if reason is not None:
        advice = f"; the model's own end is {own}" if stops and token_id not in stops else ""
        yield (
            f"`{name}` ({token_id}), which ends the rows, looks untrained: {reason}. Adapters leave the embedding and "
            f"the head as they are, so the model may never stop{advice}"
        )


def _looks_untrained(folder: Path, tokenizer: PreTrainedTokenizerBase, token_id: int) -> str | None:
    found = _embedding(folder)
    if found is None:
        return None
    path, name = found
    with safe_open(path, framework="pt") as file:
        table = file.get_slice(name)
        num_rows = table.get_shape()[0]
        added = tokenizer.added_tokens_decoder
        ordinary = [index for index in range(min(num_rows, len(tokenizer))) if index not in added]
        if token_id >= num_rows or len(ordinary) < SAMPLED_ROWS // 8:
            return None
        stride = max(1, len(ordinary) // SAMPLED_ROWS)
        norms = torch.stack([_row(table, index).norm() for index in ordinary[::stride]])
        row = _row(table, token_id)
        spare = sorted({*added, *range(len(tokenizer), num_rows)} - {token_id})[:SAMPLED_ROWS]
        others = torch.stack([_row(table, index) for index in spare if index < num_rows] or [row * 0])
    norm = row.norm()
    if norm == 0:
        return "its embedding row is zero"
    same = int((torch.nn.functional.cosine_similarity(others, row[None]) > SAME_ROW).sum())
    if same >= SAME_ROWS:
        return f"its embedding row is that of {same} other special or unused tokens"
    logs = norms.clamp_min(torch.finfo(norms.dtype).tiny).log()
    middle = logs.median()
    spread = NORMAL * (logs - middle).abs().median()
    if (norm.log() - middle).abs() > NORM_OUTLIER * spread.clamp_min(torch.finfo(logs.dtype).eps):
        return f"its embedding row has the norm {norm:.3g} where others have about {middle.exp():.3g}"
    return None


def _row(table: Any, index: int) -> torch.Tensor:
    row: torch.Tensor = table[index : index + 1]
    return row[0].to(torch.float64)


def _embedding(folder: Path) -> tuple[Path, str] | None:
    """Return the file and name of the text embedding; None where there are no weights that can be read."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                names = [name for name in file.keys() if name.endswith(EMBEDDING)]  # noqa: SIM118
        except (OSError, SafetensorError):  # what is wrong with it is said by whoever needs the weights
            return None
        for name in names:
            if not any(tower in name for tower in OTHER_TOWERS):
                return path, name
    return None
