"""Poros: fine-tune LoRA adapters on models larger than GPU memory, bitwise equal to a resident run."""

from poros.hookspecs import hookimpl

__all__ = ["__version__", "hookimpl"]

__version__ = "0.1.0"
