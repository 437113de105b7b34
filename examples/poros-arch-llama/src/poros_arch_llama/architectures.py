"""Llama models, SmolLM2 among them: plain decoders, so `DecoderArchitecture` does all the work."""

from typing import ClassVar

from poros.decoder import DecoderArchitecture


class Llama(DecoderArchitecture):
    """Blocks at ``model.layers``, one rotary table, SwiGLU: nothing to override."""

    name: ClassVar[str] = "llama"
    model_types: ClassVar[tuple[str, ...]] = ("llama",)
