"""Qwen2.5 and Qwen3 dense models. Both are plain decoders; what differs lives in Transformers' own layers."""

from __future__ import annotations

from typing import ClassVar

from poros.decoder import DecoderArchitecture

__all__ = ["Qwen2", "Qwen3"]


class Qwen2(DecoderArchitecture):
    """Qwen2 and Qwen2.5: biases on q, k and v."""

    name: ClassVar[str] = "qwen2"
    model_types: ClassVar[tuple[str, ...]] = ("qwen2",)


class Qwen3(DecoderArchitecture):
    """Qwen3: no biases, RMS norms on queries and keys, an explicit head size."""

    name: ClassVar[str] = "qwen3"
    model_types: ClassVar[tuple[str, ...]] = ("qwen3",)
