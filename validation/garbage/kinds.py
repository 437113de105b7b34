"""Kinds of inputs: how one is damaged, and which part of Poros reads it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from garbage.mutate import (
    dump,
    mutate_bytes,
    mutate_json,
    mutate_text,
    mutate_tree,
    pack_header,
    split_header,
)
from garbage.seeds import ROWS, STORE_KEY, TEMPLATE, Seeds, store
from garbage.values import ESCAPES, PIECES, evil_values
from poros.architecture import blockwise_arch_check
from poros.blocks.store_cache import StoreCache
from poros.checkpoint import SafetensorsSource, load_config, load_run_state, newest_complete
from poros.checkpoint.manifest import write_manifest
from poros.checkpoint.tensor_file import load_tensors
from poros.export.adapter import find_adapter
from poros.export.fitting import match_layers, stated
from poros.plugins import load_registry
from poros.run import describe_model, open_model

__all__ = ["KINDS", "Bench", "Kind"]

# A pickle that would run a command if anybody unpickled it.
PAYLOAD = b"cposix\nsystem\n(S'touch executed.canary'\ntR."


class Bench:
    """Where inputs are put and what they are made from.

    Attributes:
        folder: of the current input, emptied before each.
        output, cache: what Poros may write to.
    """

    def __init__(self, seeds: Seeds, folder: Path, output: Path, cache: Path) -> None:
        from transformers import AutoTokenizer

        self.seeds, self.folder, self.output, self.cache = seeds, folder, output, cache
        self.registry = load_registry()
        self.tokenizer = AutoTokenizer.from_pretrained(seeds.model)
        self.safetensors = [path.read_bytes() for path in sorted(seeds.model.glob("*.safetensors"))]
        config = load_config(seeds.model)
        architecture = blockwise_arch_check(config, self.registry).architecture
        self.module, self.parts = architecture.build(config), architecture.parts(config)
        self.templates = (TEMPLATE, *ESCAPES)

    def clear(self) -> None:
        """Empty the folders of the current input."""
        for folder in (self.folder, self.output, self.cache):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)

    def copy(self, source: Path) -> Path:
        """Copy a seed's folder into the input's, and return it."""
        shutil.copytree(source, self.folder, dirs_exist_ok=True)
        return self.folder


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of input.

    Attributes:
        share: how many of a hundred inputs are of this kind.
        make: writes a damaged input and returns the use of it.
    """

    name: str
    share: int
    make: Callable[[Random, Bench], Callable[[], object]]


def _damaged_safetensors(rng: Random, raw: bytes) -> bytes:
    if rng.random() < 0.35:
        return mutate_bytes(rng, raw)
    header, data = split_header(raw)
    return pack_header(rng, mutate_tree(rng, header), data)


def _damage_json(rng: Random, path: Path) -> None:
    path.write_bytes(mutate_json(rng, json.loads(path.read_bytes())))


def _safetensors(rng: Random, bench: Bench) -> Callable[[], object]:
    path = bench.folder / "model.safetensors"
    path.write_bytes(_damaged_safetensors(rng, rng.choice(bench.safetensors)))
    return lambda: load_tensors(path)


def _sharded(rng: Random, bench: Bench) -> Callable[[], object]:
    folder = bench.copy(bench.seeds.model)
    shards = sorted(folder.glob("*.safetensors"))
    if rng.random() < 0.7:
        _damage_json(rng, folder / "model.safetensors.index.json")
    else:
        shard = rng.choice(shards)
        match rng.randrange(6):
            case 0:
                shard.unlink()
                shard.symlink_to(
                    rng.choice((bench.seeds.model / shard.name, Path("/dev/zero"), Path("/etc/passwd")))
                )
            case 1:
                shard.unlink()
                os.mkfifo(shard)
            case 2:
                shard.unlink()
                shard.mkdir()
            case 3:
                shard.write_bytes(PAYLOAD)
            case _:
                shard.write_bytes(_damaged_safetensors(rng, shard.read_bytes()))

    def use() -> None:
        source = SafetensorsSource(folder)
        for name in source.names():
            source.load(name, torch.device("cpu"))

    return use


def _config(rng: Random, bench: Bench) -> Callable[[], object]:
    for name in ("config.json", "generation_config.json"):
        shutil.copy(bench.seeds.model / name, bench.folder)
    (bench.folder / "modeling_own.py").write_text("open('executed.canary', 'w')\n")
    tree = json.loads((bench.folder / "config.json").read_text())
    if rng.random() < 0.05:
        tree["auto_map"] = {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
    if rng.random() < 0.2:
        tree["model_type"] = rng.choice(
            ("qwen3", "gemma3_text", "gemma3", "gemma4_text", "qwen3_5_text", "qwen3_5")
        )
    (bench.folder / "config.json").write_bytes(mutate_json(rng, tree))
    return lambda: describe_model(load_config(bench.folder), registry=bench.registry)


def _model(rng: Random, bench: Bench) -> Callable[[], object]:
    folder = bench.copy(bench.seeds.model)
    if rng.random() < 0.5:
        _damage_json(rng, folder / "config.json")
    else:
        _damage_json(rng, folder / "model.safetensors.index.json")
    return lambda: open_model(folder, registry=bench.registry)


def _tokenizer(rng: Random, bench: Bench) -> Callable[[], object]:
    from poros_cli.tokenizer import load_tokenizer, stop_token_ids

    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json")
    for name in (*names, "chat_template.jinja"):
        if (bench.seeds.model / name).exists():
            shutil.copy(bench.seeds.model / name, bench.folder)
    (bench.folder / "tokenization_own.py").write_text("open('executed.canary', 'w')\n")
    path = bench.folder / rng.choice(names)
    tree = json.loads(path.read_text())
    if path.name == "tokenizer_config.json" and rng.random() < 0.1:
        tree["auto_map"] = {"AutoTokenizer": ["tokenization_own.Own", "tokenization_own.OwnFast"]}
        tree["tokenizer_class"] = "Own"
    path.write_bytes(mutate_json(rng, tree))

    rows = _good_rows(bench)

    def use() -> None:
        stop_token_ids(bench.folder)
        _read_rows(bench, load_tokenizer(bench.folder), rows)

    return use


def _good_rows(bench: Bench) -> Path:
    path = bench.folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:5]))
    return path


def _read_rows(bench: Bench, tokenizer: Any, path: Path, template: Path | None = None) -> None:
    from rich.console import Console

    from poros_cli.data_preview import show_preview
    from poros_data import RowSettings, load_dataset

    settings = RowSettings(template=None if template is None else str(template))
    dataset = load_dataset(str(path), tokenizer, max_length=256, settings=settings, cache_dir=bench.cache)
    console = Console(file=io.StringIO())
    show_preview(console, dataset, tokenizer, num_rows=2, max_length=256, warnings=())


def _adapter(rng: Random, bench: Bench) -> Callable[[], object]:
    folder = bench.copy(bench.seeds.run / "adapter")
    weights = folder / "adapter_model.safetensors"
    if rng.random() < 0.5:
        path = folder / "adapter_config.json"
        tree = {
            **json.loads(path.read_text()),
            "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {"v_proj": 4.0},
        }
        if rng.random() < 0.2:
            tree["rank_pattern"] = {rng.choice(("(a+)+$", "(", ".*" * 20, "a{1,99999999}", "(.*)*x")): 2}
        path.write_bytes(mutate_json(rng, tree))
    else:
        weights.write_bytes(_damaged_safetensors(rng, weights.read_bytes()))
    if rng.random() < 0.2:
        (folder / "adapter_model.bin").write_bytes(PAYLOAD)
    _settle_manifest(rng, folder)

    def use() -> None:
        adapter = find_adapter(folder)
        for name, sides in match_layers(adapter, bench.module, bench.parts).values():
            stated(adapter, name, sides)

    return use


def _settle_manifest(rng: Random, folder: Path) -> None:
    """Make the manifest fit the damage, so that what lies behind it is reached; or damage it; or leave it."""
    if not (folder / "manifest.json").exists():
        return
    if (drawn := rng.random()) < 0.7:
        write_manifest(folder)
    elif drawn < 0.85:
        _damage_json(rng, folder / "manifest.json")


def _checkpoint(rng: Random, bench: Bench) -> Callable[[], object]:
    run = bench.folder / "run"
    shutil.copytree(bench.seeds.run / "checkpoints", run / "checkpoints")
    folders = sorted((run / "checkpoints").iterdir())
    folder = folders[-1]
    if rng.random() < 0.1:
        folder.rename(
            folder.with_name(rng.choice(("step-" + "9" * 200, "step-0", "step-000001x", "step--00001")))
        )
        return lambda: newest_complete(run)
    if rng.random() < 0.5:
        _damage_json(rng, folder / "state.json")
    else:
        path = folder / "state.safetensors"
        path.write_bytes(_damaged_safetensors(rng, path.read_bytes()))
    _settle_manifest(rng, folder)

    def use() -> None:
        newest_complete(run)
        load_run_state(folder)

    return use


def _store(rng: Random, bench: Bench) -> Callable[[], object]:
    shutil.copytree(bench.seeds.stores, bench.cache, dirs_exist_ok=True)
    path = rng.choice(sorted((bench.cache / STORE_KEY).iterdir()))
    if path.suffix == ".json":
        _damage_json(rng, path)
    else:
        path.write_bytes(_damaged_safetensors(rng, path.read_bytes()))
    return lambda: StoreCache(bench.cache).load(STORE_KEY, store(), 2)


def _row_cache(rng: Random, bench: Bench) -> Callable[[], object]:
    from poros_data.cache import MAGIC, RowCache

    seed = next(bench.seeds.cache.rglob("rows-*.bin"))
    raw = seed.read_bytes()[len(MAGIC) + 32 :]
    length = int.from_bytes(raw[:8], "little")
    if rng.random() < 0.7:
        head = dump(mutate_tree(rng, json.loads(raw[8 : 8 + length]))).encode("utf-8", "surrogatepass")
        payload = len(head).to_bytes(8, "little") + head + raw[8 + length :]
    else:
        payload = mutate_bytes(rng, raw)
    cache = RowCache(bench.cache)
    # A hash that fits: whoever can write to the folder can write that too.
    cache.path("key").write_bytes(MAGIC + hashlib.sha256(payload).digest() + payload)
    return lambda: cache.load("key")


def _yaml(rng: Random, bench: Bench) -> Callable[[], object]:
    from poros_cli.config_file import resolve_config

    path = bench.folder / "run.yaml"
    text = bench.seeds.config.read_text()
    if rng.random() < 0.1:
        lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
        text = "\n".join(lines) + f"\n{text}\nreport_to: *a11\n"
    raw = mutate_text(rng, text).encode("utf-8", "surrogatepass")
    path.write_bytes(mutate_bytes(rng, raw) if rng.random() < 0.2 else raw)
    return lambda: resolve_config(path)


def _overrides(rng: Random, bench: Bench) -> Callable[[], object]:
    from poros_cli.config_file import resolve_config
    from poros_cli.schema import sections, settings

    def value() -> str:
        drawn = rng.choice(evil_values())
        return drawn if isinstance(drawn, str) and rng.random() < 0.5 else dump(drawn)

    names = [*settings(), *sections(), *PIECES[:12]]
    given = [
        f"{rng.choice(names)}{rng.choice(('=', '=', '=', '', ': '))}{value()}"
        for _ in range(rng.randint(1, 2))
    ]
    return lambda: resolve_config(bench.seeds.config, overrides=given)


def _rows(rng: Random, bench: Bench) -> Callable[[], object]:
    rows = [rng.choice(ROWS) for _ in range(3)]
    rows[rng.randrange(3)] = mutate_tree(rng, rng.choice(ROWS))
    ending = rng.choice((".jsonl", ".jsonl", ".json", ".ndjson", ".txt"))
    text = "\n".join(map(dump, rows)) + "\n" if ending != ".json" else dump(rows)
    if rng.random() < 0.3:
        text = mutate_text(rng, text)
    raw = text.encode("utf-8", "surrogatepass")
    path = bench.folder / f"rows{ending}"
    path.write_bytes(mutate_bytes(rng, raw) if rng.random() < 0.3 else raw)
    return lambda: _read_rows(bench, bench.tokenizer, path)


def _parquet(rng: Random, bench: Bench) -> Callable[[], object]:
    import pyarrow
    import pyarrow.parquet

    columns: dict[str, Any] = {
        "text": ["plain", "rows", None],
        "messages": [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]] * 3,
        "prompt": [b"bytes", b"\xff", b""],
        "completion": [1.5, float("nan"), 2**53],
    }
    chosen = rng.sample(sorted(columns), rng.randint(1, 4))
    buffer = io.BytesIO()
    table = pyarrow.table({name: columns[name] for name in chosen})
    pyarrow.parquet.write_table(table, buffer, compression=rng.choice(("none", "snappy", "zstd")))
    path = bench.folder / "rows.parquet"
    path.write_bytes(mutate_bytes(rng, buffer.getvalue()) if rng.random() < 0.9 else buffer.getvalue())
    return lambda: _read_rows(bench, bench.tokenizer, path)


def _template(rng: Random, bench: Bench) -> Callable[[], object]:
    text = rng.choice(bench.templates)
    if rng.random() < 0.7:
        text = mutate_text(rng, TEMPLATE, (*ESCAPES, *PIECES))
    raw = text.encode("utf-8", "surrogatepass")
    path = bench.folder / "chat_template.jinja"
    path.write_bytes(mutate_bytes(rng, raw) if rng.random() < 0.2 else raw)
    rows = _good_rows(bench)
    return lambda: _read_rows(bench, bench.tokenizer, rows, path)


def _prompts(rng: Random, bench: Bench) -> Callable[[], object]:
    from poros_cli.sample_prompts import read_prompts

    path = bench.folder / "prompts.txt"
    raw = mutate_text(rng, "Say 1\nSay 2\n\nSay 3\n").encode("utf-8", "surrogatepass")
    path.write_bytes(mutate_bytes(rng, raw) if rng.random() < 0.5 else raw)
    return lambda: read_prompts(str(path))


def _report(rng: Random, bench: Bench) -> Callable[[], object]:
    from poros_cli.report import read_run, write_report

    for name in ("run.json", "metrics.jsonl", "samples.jsonl"):
        shutil.copy(bench.seeds.run / name, bench.folder)
    path = bench.folder / rng.choice(("run.json", "run.json", "metrics.jsonl", "samples.jsonl"))
    if path.suffix == ".json":
        _damage_json(rng, path)
    else:
        lines = path.read_text().splitlines()
        index = rng.randrange(len(lines))
        lines[index] = dump(mutate_tree(rng, json.loads(lines[index])))
        raw = ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")
        path.write_bytes(mutate_bytes(rng, raw) if rng.random() < 0.2 else raw)

    def use() -> None:
        page = bench.output / "report.html"
        write_report(read_run(bench.folder), page)
        text = page.read_text(encoding="utf-8")
        if "<script" in text or "<img" in text:
            raise RuntimeError("The page holds markup that an input brought along.")

    return use


def _receipt(rng: Random, bench: Bench) -> Callable[[], object]:
    from poros.evidence import parse_receipts

    tree = {"qwen2": [{name: name for name in RECEIPT_FIELDS}]}
    raw = mutate_json(rng, tree)
    return lambda: parse_receipts(raw, "qwen2", "receipts.json")


RECEIPT_FIELDS = (
    "name",
    "claim",
    "subject",
    "weight_format",
    "device_name",
    "torch",
    "transformers",
    "commit",
)

KINDS = (
    Kind("safetensors file", 20, _safetensors),
    Kind("sharded model", 10, _sharded),
    Kind("config.json", 7, _config),
    Kind("model folder", 4, _model),
    Kind("tokenizer files", 4, _tokenizer),
    Kind("adapter folder", 8, _adapter),
    Kind("run checkpoint", 8, _checkpoint),
    Kind("cached store", 5, _store),
    Kind("cached rows", 4, _row_cache),
    Kind("YAML config", 6, _yaml),
    Kind("--set values", 6, _overrides),
    Kind("JSON and JSONL rows", 7, _rows),
    Kind("Parquet rows", 3, _parquet),
    Kind("chat template", 3, _template),
    Kind("prompts file", 1, _prompts),
    Kind("report inputs", 3, _report),
    Kind("receipts", 1, _receipt),
)
