"""The files of a merged model folder besides its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from poros.checkpoint.config import CONFIG_FILE
from poros.checkpoint.json_files import read_json_object
from poros.checkpoint.paths import refuse_links_outside
from poros.run.opening import OpenModel

__all__ = ["copy_companions", "write_config"]

# Tokenizer, chat template, generation settings and the terms under which the base may be used. Not the processors of a
# wrapper's images and sounds: the merged model reads text.
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.tiktoken",
    "*.jinja",
    "chat_template.json",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
DTYPE = "bfloat16"


def write_config(model: OpenModel, folder: Path) -> None:
    """Write the text model's ``config.json``.

    The file of a model without wrapper is kept as its authors wrote it but for dtype and class: other programs read
    keys that Transformers renames when it saves.
    """
    config = model.meta.config
    if model.meta.wrapper is None:
        raw = read_json_object(model.folder / CONFIG_FILE)
    else:
        raw = json.loads(config.to_json_string(use_diff=False))
        raw.pop("_name_or_path", None)
        raw["model_type"] = config.model_type
    raw["architectures"] = [type(model.meta.module).__name__]
    raw["tie_word_embeddings"] = model.meta.parts.tied
    for key in [key for key in ("dtype", "torch_dtype") if key in raw] or ["dtype"]:
        raw[key] = DTYPE
    _write_json(folder / CONFIG_FILE, raw)


def copy_companions(source: Path, folder: Path) -> tuple[str, ...]:
    """Copy the tokenizer's files and the like; return their names."""
    refuse_links_outside(source, COMPANIONS)
    found = {path.name: path for pattern in COMPANIONS for path in source.glob(pattern) if path.is_file()}
    for name, path in sorted(found.items()):
        shutil.copyfile(path, folder / name)  # links of a hub's cache become files
    return tuple(sorted(found))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
