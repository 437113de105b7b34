"""NEFTune: uniform noise on the rows of the embedding, in training only.

Shape letters: B batch, T tokens, D hidden size.
"""

from __future__ import annotations

import torch

__all__ = ["add_embedding_noise"]


@torch.no_grad()
def add_embedding_noise(hidden: torch.Tensor, alpha: float, seed: int) -> None:
    """Add noise to (B, T, D) hidden states that come from the embedding, in place.

    Uniform in ``alpha / sqrt(T * D)`` to both sides, drawn in the dtype of ``hidden``, as Transformers'
    ``neftune_noise_alpha`` does: T counts the padding of the micro-batch.

    Args:
        hidden: what block 0 will read. It is kept until its backward, so that no recompute draws again.
        alpha: NEFTune's; above 0.
        seed: of this step and micro-batch, see `poros.determinism.embedding_seed`.

    Source:
        Jain et al. 2023, NEFTune (arXiv:2310.05914).
    """
    generator = torch.Generator(hidden.device).manual_seed(seed)
    # Transformers takes this root in float32.
    size = float(alpha / torch.tensor(hidden.shape[1] * hidden.shape[2]).sqrt())
    hidden.add_(torch.empty_like(hidden).uniform_(-size, size, generator=generator))
