"""`poros.train`, and the examples of docs/python-api.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import poros
from poros.errors import ConfigError, PluginError, UserError
from poros_cli.config import RunConfig
from poros_cli.config_file import config_from_mapping, load_config

ROOT = Path(__file__).parents[3]
EXAMPLES = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "python-api.md").read_text(), re.M | re.S)


@pytest.fixture
def config(model: Path, rows: Path, tmp_path: Path) -> dict[str, Any]:
    """A short run on the CPU."""
    return {
        "model": model,
        "data": str(rows),
        "output": tmp_path / "out",
        "max_steps": 2,
        "device": "cpu",
        "lora": {"rank": 4},
        "numerics": {"compute_dtype": torch.float32},
    }


def silent(line: str) -> None:
    """Show nothing."""


def test_a_run_returns_its_result_and_tells_its_reporters(config: dict[str, Any]) -> None:
    class Steps(poros.Reporter):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def on_step(self, event: Any) -> None:
            self.seen.append(event.step)

    steps, said = Steps(), list[str]()
    result = poros.train(config, reporters=[steps], say=said.append)
    assert result.steps == 2
    assert steps.seen == [1, 2]
    assert result.adapter == config["output"] / "adapter"
    assert (config["output"] / "metrics.jsonl").exists()
    assert any("2 blocks, nf4" in line for line in said)


def test_every_form_of_a_config_trains_the_same_bits(config: dict[str, Any], tmp_path: Path) -> None:
    written = {**config, "model": str(config["model"]), "output": str(tmp_path / "file")}
    written["numerics"] = {"compute_dtype": "float32"}
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(written))
    objects = {
        **config,
        "output": tmp_path / "objects",
        "lora": poros.LoraSettings(rank=4),
        "numerics": poros.Numerics(compute_dtype=torch.float32),
    }
    made: RunConfig = config_from_mapping({**config, "output": str(tmp_path / "made")})
    runs = [poros.train(form, say=silent) for form in (config, file, objects, made)]
    adapters = [load_file(run.adapter / "adapter_model.safetensors") for run in runs if run.adapter]
    assert len(adapters) == 4
    for name, tensor in adapters[0].items():
        assert all(torch.equal(other[name], tensor) for other in adapters)


def test_a_mapping_is_what_the_file_would_be(config: dict[str, Any], tmp_path: Path) -> None:
    values = {
        "model": "m",
        "data": {"a.jsonl": 1, "b.jsonl": 0.5},
        "output": "2024-01-01",
        "epochs": 2,
        "resume": True,
        "cache_dir": None,
        "vram": "8GB",
        "lora": {"targets": ["q_proj", "v_proj"], "dropout": 0.1},
        "optimizer": {"learning_rate": 1e-5, "max_grad_norm": None},
    }
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(values).replace("1e-05", "1.0e-5"))
    assert config_from_mapping(values) == load_config(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"lora": {"rnak": 8}},
            r"Unknown setting `lora\.rnak` \(the given mapping\)\. Did you mean `lora\.rank`\?",
        ),
        ({"max_steps": "2"}, r"`max_steps`.*an integer.*`2`"),
        ({"max_steps": 0}, r"`max_steps`.*positive.*\(the given mapping\)"),
        ({"max_steps": object()}, r"`max_steps`.*what a config file can hold.*object"),
        ({"lora": 8}, r"Bad section `lora`"),
        ({"lora": {"rank": 0}}, r"`lora\.rank`.*\(the given mapping\)"),
    ],
)
def test_a_mapping_that_is_wrong_is_refused_by_name(
    config: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        poros.train({**config, **change}, say=silent)


def test_something_else_than_a_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="a path, a mapping or a `RunConfig`, got int"):
        poros.train(3)


def test_without_the_command_lines_distribution_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POROS_PLUGINS", "poros-quant,poros-arch-qwen")
    with pytest.raises(PluginError, match=r"`uv add poros-cli`.*`poros\.open_model`"):
        poros.train("run.yaml")


def test_a_used_output_folder_is_refused_as_the_command_does(config: dict[str, Any]) -> None:
    config["output"].mkdir()
    (config["output"] / "mine.txt").write_text("")
    with pytest.raises(UserError, match="output"):
        poros.train(config, say=silent)


@pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing:FutureWarning"
)  # of TRL 1.16, as Transformers 5.24 says
@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_examples_of_the_docs_run(
    number: int, model: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert rows.name == "rows.jsonl"
    exec(
        compile(EXAMPLES[number], f"docs/python-api.md example {number + 1}", "exec"), {"__name__": "example"}
    )


def test_the_docs_have_an_example_for_each_way_in() -> None:
    for call in ("poros.train(", "engine.step(", "SFTTrainer(", "poros.streamed_model("):
        assert any(call in example for example in EXAMPLES)
