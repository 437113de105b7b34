"""The drop-in module: a PEFT model whose frozen blocks stream under autograd, for other people's trainers."""

from poros.torch_module.build import streamed_model
from poros.torch_module.model import StreamedForCausalLM

__all__ = ["StreamedForCausalLM", "streamed_model"]
