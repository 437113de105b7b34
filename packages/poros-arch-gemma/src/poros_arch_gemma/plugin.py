"""The plugin of the Gemma architectures: none is gated yet, so none is registered."""

from __future__ import annotations

from collections.abc import Sequence

from poros import hookimpl
from poros.interfaces import Architecture

__all__ = ["poros_register_architectures"]


@hookimpl
def poros_register_architectures() -> Sequence[type[Architecture]]:
    """Register nothing: a Gemma model is refused by name until its adapter has passed the gates."""
    return ()
