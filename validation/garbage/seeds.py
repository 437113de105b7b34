"""Good inputs of every kind, small ones, that are damaged afterwards."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tiny_model import write_tiny_model

from poros.blocks.layout import make_layout
from poros.blocks.store import HostStore
from poros.blocks.store_cache import StoreCache
from poros.interfaces import TensorSpec

__all__ = ["ROWS", "TEMPLATE", "Seeds", "make_seeds", "store"]

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS = (
    {"instruction": "Add", "input": "1 2", "output": "3", "history": [["q", "a"]], "system": "Be brief."},
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "train": True}]},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo", "weight": 1}]},
    {"prompt": "2 + 2 =", "completion": " 4"},
    {"text": "plain text, and more of it"},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
            {"role": "assistant", "tool_calls": [{"function": {"name": "w", "arguments": '{"city": "x"}'}}]},
            {"role": "tool", "content": "sunny", "name": "w"},
            {"role": "assistant", "content": "Sunny.", "reasoning_content": "Because."},
        ],
        "tools": '[{"name": "w", "parameters": {}}]',
    },
)
LAYOUT = make_layout([TensorSpec(name="w", dtype=torch.uint8, shape=(1000,))])
STORE_KEY = "key"


@dataclass(frozen=True, slots=True)
class Seeds:
    """Folders and files that are read and never changed.

    Attributes:
        model: a tiny model of two shards with a tokenizer.
        run: the output folder of a finished run on it, with a checkpoint and an adapter.
        config: the YAML config of that run.
        cache: tokenized rows that it left.
        stores: a cached store.
    """

    model: Path
    run: Path
    config: Path
    cache: Path
    stores: Path


def make_seeds(folder: Path) -> Seeds:
    """Make everything, a short real run included."""
    from poros_cli.main import run

    model = write_tiny_model(folder / "model", num_blocks=2, template=TEMPLATE, max_shard_size="20KB")
    rows = folder / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"instruction": f"Say {i}", "output": f"{i}."}) + "\n" for i in range(6))
    )
    config = folder / "run.yaml"
    config.write_text(
        f"model: {model}\ndata: {rows}\noutput: {folder / 'run'}\ncache_dir: {folder / 'cache'}\n"
        f"eval_data: {rows}\nmax_steps: 2\neval_every: 1\nsave_every: 1\nmicro_batches: 2\ndevice: cpu\nseed: 3\n"
        "sample_prompts: [Say 7]\nsample_tokens: 4\nlora:\n  rank: 2\n  targets: [q_proj, v_proj]\n"
        "optimizer:\n  learning_rate: 1e-3\nrows:\n  truncation: drop\nplan:\n  slots: 2\n"
    )
    code = run(["train", str(config)])
    if code != 0:
        raise RuntimeError(f"The run that seeds are made from: expected exit code 0, got {code}.")
    StoreCache(folder / "stores").save(STORE_KEY, store(), 2)
    return Seeds(
        model=model, run=folder / "run", config=config, cache=folder / "cache", stores=folder / "stores"
    )


def store() -> HostStore:
    """Return a store of two small blocks."""
    return HostStore([LAYOUT, LAYOUT], pin=False)
