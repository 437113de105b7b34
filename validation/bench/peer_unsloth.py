"""The resident peer with kernels of its own: Unsloth 2026.10, loaded and adapted as its documentation shows.

`FastLanguageModel.from_pretrained` over a prequantized NF4 checkpoint with random weights, `get_peft_model` with
``use_gradient_checkpointing="unsloth"`` (activations offloaded) or, with the setting ``gradient_checkpointing: true``,
the plain one. Whole optimizer steps as for everybody else instead of its trainer.

Data libraries that its imports name and its steps never call (`datasets`, `pyarrow`, `pandas`) are stood in for unless
all are installed: together they are larger than what the GPU machine may be sent.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peer_common import LEARNING_RATE, TARGETS, Peer, measure_peer

from poros.bench import serve

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")

STAND_INS = ("datasets", "pyarrow", "pandas")
SHARD_BYTES = 4_000_000_000


class _StandIn(types.ModuleType):
    """A module of empty classes, so that `from datasets import Dataset` works."""

    __version__ = "4.8.5"
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = sys.modules.get(f"{self.__name__}.{name}") or type(name, (), {})
        setattr(self, name, value)
        return value


class _Finder:
    """Makes every stand-in and its submodules."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        wanted = name.partition(".")[0] in STAND_INS
        return importlib.machinery.ModuleSpec(name, _Finder, is_package=True) if wanted else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    @staticmethod
    def exec_module(module: types.ModuleType) -> None:
        """Nothing to run."""


def _stand_in_for_what_is_missing() -> None:
    if all(importlib.util.find_spec(name) for name in STAND_INS):
        return
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
    ask = importlib.metadata.version
    # Unsloth asks for the version of `datasets` before it imports it.
    importlib.metadata.version = lambda name: _StandIn.__version__ if name in STAND_INS else ask(name)


def build(values: Mapping[str, Any], config: Any, device: torch.device) -> Peer:
    """Return Unsloth's model with adapters on every linear layer."""
    from unsloth import FastLanguageModel

    settings = {"gradient_checkpointing": "unsloth", **values["settings"]}
    model, _ = FastLanguageModel.from_pretrained(
        model_name=str(_checkpoint(values, config, device)),
        max_seq_length=values["tokens"],
        dtype=torch.bfloat16,
        load_in_4bit=True,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=values["rank"],
        target_modules=TARGETS,
        lora_alpha=2 * values["rank"],
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing=settings["gradient_checkpointing"],
        random_state=1,
        max_seq_length=values["tokens"],
    )
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]

    def loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return model(input_ids=ids, labels=labels).loss

    return Peer(
        loss=loss,
        parameters=parameters,
        optimizer=torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True),
        settings={**settings, "optimizer": "AdamW, fused", "stand_ins": _stood_in()},
    )


def _stood_in() -> list[str]:
    return [name for name in STAND_INS if isinstance(sys.modules.get(name), _StandIn)]


def _checkpoint(values: Mapping[str, Any], config: Any, device: torch.device) -> Path:
    """Return a prequantized checkpoint with random weights and a byte-level tokenizer, written once per shape."""
    from peer_peft import quantized_model
    from safetensors.torch import save_file

    folder = Path(values["scratch"]) / f"{Path(values['model']).name}-nf4"
    if folder.exists():
        return folder
    unfinished = folder.with_suffix(".tmp")
    model = quantized_model(config, device)
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, value in model.state_dict().items():
        if size > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = value.cpu().contiguous()
        size += value.numel() * value.itemsize
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()
    unfinished.mkdir(parents=True)
    where, total = {}, 0
    for index, shard in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, unfinished / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
        total += sum(value.numel() * value.itemsize for value in shard.values())
    _write_texts(unfinished, config, {"metadata": {"total_size": total}, "weight_map": where})
    unfinished.rename(folder)
    return folder


def _write_texts(folder: Path, config: Any, index: Mapping[str, Any]) -> None:
    import json

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import BitsAndBytesConfig, PreTrainedTokenizerFast

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    described = config.to_dict() | {"quantization_config": quantization.to_dict(), "dtype": "bfloat16"}
    described["architectures"] = ["Qwen2ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(folder)


def _run(values: Mapping[str, Any]) -> dict[str, Any]:
    _stand_in_for_what_is_missing()
    import unsloth  # noqa: F401  # before Transformers and PEFT, which it patches

    return measure_peer(values, build)


if __name__ == "__main__":
    serve(_run, early=())
