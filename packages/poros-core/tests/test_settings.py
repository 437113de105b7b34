"""Settings are checked when they are made; nothing is taken for something else in silence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from poros.errors import ConfigError
from poros.settings import LoraSettings, Numerics, OptimizerSettings, Plan

BAD: tuple[tuple[type, dict[str, Any], str], ...] = (
    (LoraSettings, {"rank": 0}, r"`lora.rank`: expected a positive integer, got 0"),
    (LoraSettings, {"rank": 2.5}, r"`lora.rank`: expected a positive integer, got 2.5"),
    (LoraSettings, {"rank": True}, r"`lora.rank`: expected a positive integer, got True"),
    (LoraSettings, {"alpha": 0}, r"`lora.alpha`: expected a positive number"),
    (LoraSettings, {"alpha": math.inf}, r"`lora.alpha`: .* got inf"),
    (LoraSettings, {"alpha": math.nan}, r"`lora.alpha`: .* got nan"),
    (LoraSettings, {"dropout": 1.0}, r"`lora.dropout`: expected a probability in \[0, 1\)"),
    (LoraSettings, {"dropout": math.nan}, r"`lora.dropout`"),
    (LoraSettings, {"targets": ()}, r"`lora.targets`: expected at least one leaf name"),
    # PEFT takes an empty list for "all blocks".
    (LoraSettings, {"blocks": ()}, r"`lora.blocks`: expected at least one block, or null for all, got \(\)"),
    (LoraSettings, {"rank_pattern": {"q_proj": 0}}, r"`lora.rank_pattern\['q_proj'\]`: .* integer, got 0"),
    (LoraSettings, {"alpha_pattern": {"q_proj": -1}}, r"`lora.alpha_pattern\['q_proj'\]`: .* got -1"),
    (Numerics, {"compute_dtype": torch.float16}, r"`compute_dtype`: expected bfloat16 or float32"),
    (Numerics, {"storage_dtype": torch.int8}, r"`storage_dtype`"),
    (Numerics, {"length_bucket": 0}, r"`length_bucket`: expected a positive integer"),
    (Numerics, {"loss_chunk_positions": 2.5}, r"`loss_chunk_positions`: .* got 2.5"),
    (OptimizerSettings, {"learning_rate": 0}, r"`learning_rate`"),
    (OptimizerSettings, {"learning_rate": math.inf}, r"`learning_rate`: expected a positive number, got inf"),
    (OptimizerSettings, {"weight_decay": -0.1}, r"`weight_decay`: expected zero or more"),
    (OptimizerSettings, {"beta1": 1.0}, r"`beta1`"),
    (OptimizerSettings, {"beta2": -0.1}, r"`beta2`"),
    (OptimizerSettings, {"eps": 0}, r"`eps`"),
    (OptimizerSettings, {"max_grad_norm": 0}, r"`max_grad_norm`: expected a positive number or null"),
    (
        OptimizerSettings,
        {"schedule": "step"},
        r"`schedule`: expected constant \| constant_with_warmup \| linear",
    ),
    (OptimizerSettings, {"warmup_steps": 2.5}, r"`warmup_steps`: .* got 2.5"),
    (OptimizerSettings, {"schedule": "constant", "warmup_steps": 5}, r"`constant_with_warmup` has a warm-up"),
    (OptimizerSettings, {"schedule": "warmup_stable_decay"}, r"`decay_steps`: expected a positive .* got 0"),
    (OptimizerSettings, {"decay_steps": 5}, r"`decay_steps`: expected 0 with `schedule: linear` .* got 5"),
    (OptimizerSettings, {"decay_steps": 2.5}, r"`decay_steps`: .* got 2.5"),
    (OptimizerSettings, {"name": "adam"}, r"`name`: expected adamw \| adamw_8bit, got 'adam'"),
    (OptimizerSettings, {"lora_plus_ratio": 0}, r"`lora_plus_ratio`: expected a positive number, got 0"),
    (OptimizerSettings, {"lora_plus_ratio": math.inf}, r"`lora_plus_ratio`: .* got inf"),
    (Numerics, {"neftune_alpha": -1}, r"`neftune_alpha`: expected zero or more, got -1"),
    (Numerics, {"neftune_alpha": 1e300}, r"`neftune_alpha`: expected at most 1e\+38, got 1e\+300"),
    (Numerics, {"neftune_alpha": math.nan}, r"`neftune_alpha`: .* got nan"),
    (Plan, {"disk_blocks": -1}, r"`disk_blocks`: expected zero or a positive integer"),
    (
        Plan,
        {"residency": "resident", "disk_blocks": 1},
        r"`disk_blocks`: expected 0 with `residency: resident`",
    ),
    (Plan, {"residency": "disk"}, r"`residency`: expected streamed \| resident"),
    (Plan, {"num_slots": 1}, r"`slots`: expected 2 or more, got 1"),
    (Plan, {"num_slots": 2.5}, r"`slots`: expected 2 or more, got 2.5"),
    (Plan, {"order": "random"}, r"`order`: expected block-major \| micro-batch-major"),
)


@pytest.mark.parametrize(("kind", "values", "message"), BAD, ids=lambda value: str(value)[:50])
def test_a_bad_value_is_refused_with_what_was_expected(
    kind: type, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**values)


@pytest.mark.parametrize("kind", [LoraSettings, Numerics, OptimizerSettings, Plan])
def test_the_defaults_are_valid_and_frozen(kind: type) -> None:
    made = kind()
    with pytest.raises(AttributeError):
        setattr(made, next(iter(kind.__slots__)), None)  # type: ignore[attr-defined]
