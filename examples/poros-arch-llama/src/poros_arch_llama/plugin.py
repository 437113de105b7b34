"""What the entry point of the group `poros` names."""

from poros import hookimpl
from poros_arch_llama.architectures import Llama


@hookimpl
def poros_register_architectures() -> list[type[Llama]]:
    """Register ``llama``."""
    return [Llama]
