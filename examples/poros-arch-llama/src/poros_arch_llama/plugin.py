"""What the entry point of the group `poros` names."""

from poros import hookimpl


@hookimpl
def poros_register_architectures() -> list[type]:
    """Register ``llama``."""
    from poros_arch_llama.architectures import Llama  # not before it is asked for: torch comes with it

    return [Llama]
