"""From what the user calls a model to a folder and its config; the network is the last resort."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import save_file

from poros.checkpoint import SafetensorsSource, load_config, resolve_model, transformers_knows
from poros.errors import ArchitectureError, CheckpointError, UserError

QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "vocab_size": 32,
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace the download by a recorder; an exception put first in the list is raised."""
    calls: list[Any] = []

    def download(model: str, **options: Any) -> str:
        if calls and isinstance(calls[0], Exception):
            raise calls[0]
        calls.append((model, options))
        return "/cache/model"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def response(status: int) -> Any:
    class Response:
        status_code = status
        headers: dict[str, str] = {}  # noqa: RUF012 - a stub
        request = None

    return Response()


def test_a_local_folder_is_taken_without_the_network(
    tmp_path: Path, hub: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("org/model", "./org/model", str(tmp_path / "org/model"), "org", "~/org/model"):
        assert resolve_model(name).is_dir()
    assert hub == []


@pytest.mark.parametrize(
    "model",
    ["./model", "../model", "~/model", "/no/model", "a/b/c", "models/", "exists/model", "a\\b", "", "."],
)
def test_a_missing_path_never_reaches_the_network(
    model: str, tmp_path: Path, hub: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exists").mkdir()
    if model == ".":
        assert resolve_model(model).is_dir()
    else:
        with pytest.raises(CheckpointError, match=r"no such folder.*nothing was looked up on the network"):
            resolve_model(model)
    assert hub == []


def test_a_path_that_the_system_refuses_is_a_users_error(hub: list[Any]) -> None:
    with pytest.raises(CheckpointError, match=r"File name too long"):
        resolve_model("a" * 5000)
    assert hub == []


def test_a_local_model_is_read_without_any_look_at_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *names, **_: calls.append(names))
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: calls.append(address))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    folder = resolve_model(str(write_config(tmp_path, QWEN2)))
    load_config(folder)
    SafetensorsSource(folder)
    assert calls == []


def test_a_file_is_refused(tmp_path: Path, hub: list[Any]) -> None:
    (tmp_path / "m.gguf").write_text("x")
    with pytest.raises(CheckpointError, match=r"got a file"):
        resolve_model(str(tmp_path / "m.gguf"))
    assert hub == []


def test_a_hub_id_is_downloaded_without_anything_that_can_run_code(hub: list[Any]) -> None:
    from huggingface_hub.utils import filter_repo_objects

    assert resolve_model("Qwen/Qwen2.5-7B") == Path("/cache/model")
    model, options = hub[0]
    assert model == "Qwen/Qwen2.5-7B"
    files = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "merges.txt",
        "vocab.json",
        "generation_config.json",
    ]
    refused = [
        "pytorch_model.bin",
        "modeling_x.py",
        "original/consolidated.00.pth",
        "original/model.safetensors",
        "consolidated.safetensors",
        "model.gguf",
        "pytorch_model.bin.index.json",
        "weights.pt",
        "training_args.bin",
        "onnx/model.onnx",
    ]
    assert list(filter_repo_objects(files + refused, **options)) == files


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            errors.GatedRepoError("403", response=response(403)),
            "licence not accepted or no login.*hf auth login",
        ),
        (
            errors.RepositoryNotFoundError("401", response=response(401)),
            "no such model, or a private one and no login",
        ),
        (errors.HfHubHTTPError("403", response=response(403)), "HTTP 403: licence not accepted or no login"),
        (errors.HfHubHTTPError("500", response=response(500)), "HTTP 500.*Try again"),
        (errors.LocalEntryNotFoundError("no\nlink"), "neither: no link.*local folder"),
        (errors.HFValidationError("bad id"), "bad id.*Correct the name"),
        (OSError(28, "No space left on device"), "No space left"),
    ],
)
def test_a_failed_download_says_why(hub: list[Any], error: Exception, message: str) -> None:
    hub.append(error)
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve_model("org/model")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_offline_without_a_copy_names_the_switch(hub: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.append(errors.LocalEntryNotFoundError("offline"))
    with pytest.raises(CheckpointError, match=r"offline mode and no complete copy.*HF_HUB_OFFLINE"):
        resolve_model("org/model")


def test_offline_uses_the_real_hubs_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"offline mode and no complete copy"):
        resolve_model("org/model")
    repository = tmp_path / "models--org--model"
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert resolve_model("org/model") == repository / "snapshots" / "abc"


def write_config(folder: Path, content: object) -> Path:
    (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_a_config_becomes_transformers_own(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, QWEN2))
    assert type(config).__name__ == "Qwen2Config"
    assert config.hidden_size == 8


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a config\.json, got no such file"):
        load_config(tmp_path)


def test_bad_json_is_refused_with_line_and_column(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json:2:17"):
        load_config(write_config(tmp_path, '{\n "hidden_size": ,\n}'))


@pytest.mark.parametrize("content", ["[]", '"x"', "3"])
def test_json_that_is_no_object_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(CheckpointError, match=r"an object"):
        load_config(write_config(tmp_path, content))


@pytest.mark.parametrize("model_type", [None, "", 3, ["qwen2"]])
def test_a_config_without_model_type_is_refused(tmp_path: Path, model_type: object) -> None:
    with pytest.raises(CheckpointError, match=r"model_type"):
        load_config(write_config(tmp_path, QWEN2 | {"model_type": model_type}))


@pytest.mark.parametrize(
    "field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"]
)
@pytest.mark.parametrize("how", ["absent", "null"])
def test_an_absent_size_is_named_instead_of_filled_in(tmp_path: Path, field: str, how: str) -> None:
    content = {key: value for key, value in QWEN2.items() if key != field}
    with pytest.raises(CheckpointError, match=field):
        load_config(write_config(tmp_path, content | ({field: None} if how == "null" else {})))


@pytest.mark.parametrize("value", ["8", 0, -1, 8.5, True, [8]])
def test_a_size_that_is_no_positive_integer_is_named(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError, match=r"hidden_size"):
        load_config(write_config(tmp_path, QWEN2 | {"hidden_size": value}))


def test_a_type_with_names_of_its_own_is_read(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 32}
    assert load_config(write_config(tmp_path, gpt2)).hidden_size == 8
    del gpt2["n_layer"]
    with pytest.raises(CheckpointError, match=r"n_layer"):
        load_config(write_config(tmp_path, gpt2))


def test_a_wrappers_text_config_may_use_its_types_defaults_but_not_its_sizes(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 16}
    assert (
        load_config(
            write_config(tmp_path, {"model_type": "gemma3", "text_config": text})
        ).text_config.hidden_size
        == 8
    )
    del text["num_hidden_layers"]
    with pytest.raises(CheckpointError, match=r"text_config\.num_hidden_layers"):
        load_config(write_config(tmp_path, {"model_type": "gemma3", "text_config": text}))


def test_a_wrapper_without_its_text_config_is_not_filled_in(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected the field `text_config`, got none"):
        load_config(write_config(tmp_path, {"model_type": "gemma3", "vision_config": {"hidden_size": 8}}))


def test_a_moe_config_without_a_dense_size_reaches_the_gate(tmp_path: Path) -> None:
    content = {key: value for key, value in QWEN2.items() if key != "intermediate_size"}
    moe = content | {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 8}
    assert load_config(write_config(tmp_path, moe)).model_type == "qwen3_moe"


def test_an_unknown_type_names_the_installed_version_and_the_nearest_type(tmp_path: Path) -> None:
    import transformers

    config = {"model_type": "qwen9", "architectures": ["Qwen9ForCausalLM"]}
    with pytest.raises(
        ArchitectureError, match=rf"Transformers {transformers.__version__} knows, got `qwen9`"
    ) as caught:
        load_config(write_config(tmp_path, config))
    assert "qwen" in str(caught.value).split("nearest known one is")[1]
    assert isinstance(caught.value, UserError)


@pytest.mark.parametrize("model_type", ["qwen2", "deepmind9"])
def test_a_model_with_code_of_its_own_is_refused_and_its_code_never_runs(
    tmp_path: Path, model_type: str
) -> None:
    (tmp_path / "configuration_x.py").write_text("raise SystemExit('ran')")
    config = QWEN2 | {"model_type": model_type, "auto_map": {"AutoConfig": "configuration_x.Config"}}
    with pytest.raises(ArchitectureError, match=r"auto_map.*never runs such code"):
        load_config(write_config(tmp_path, config))


def test_a_type_that_poros_serves_and_transformers_lacks_names_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    monkeypatch.setattr(transformers, "CONFIG_MAPPING", {"qwen2": object()})
    monkeypatch.setattr(transformers, "__version__", "4.57.1")
    with pytest.raises(
        ArchitectureError,
        match=r"too old for model type `qwen3_5`, which Poros serves: expected Transformers 5\.2\.0 or newer.*"
        r"got Transformers 4\.57\.1",
    ):
        load_config(write_config(tmp_path, {"model_type": "qwen3_5"}))


@pytest.mark.parametrize(
    ("stated", "text"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"quantized with gptq, 4 bits.*`-GPTQ-Int4`"),
        ({"quant_method": "awq", "bits": 4}, r"quantized with awq, 4 bits.*`-AWQ`"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"with bitsandbytes, 4 bits.*`-bnb-4bit`"),
        ({"quant_method": "fp8"}, r"quantized with fp8\b.*`-FP8`"),
        ({"quant_method": "compressed-tensors"}, r"quantized with compressed-tensors\b.*this one"),
    ],
    ids=lambda value: value.get("quant_method") if isinstance(value, dict) else "",
)
def test_a_quantized_checkpoint_is_refused_with_what_to_use(
    tmp_path: Path, stated: dict[str, object], text: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"{text}.*Poros quantizes it by itself"):
        load_config(write_config(tmp_path, QWEN2 | {"quantization_config": stated}))


def test_a_quantized_text_model_inside_a_wrapper_is_refused(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "quantization_config": {"quant_method": "awq"}}
    with pytest.raises(CheckpointError, match=r"quantized with awq"):
        load_config(write_config(tmp_path, {"model_type": "gemma3", "text_config": text}))


def test_a_value_that_transformers_refuses_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a valid `qwen2` config"):
        load_config(write_config(tmp_path, QWEN2 | {"layer_types": ["nonsense", "nonsense"]}))


def test_which_types_transformers_knows() -> None:
    assert transformers_knows("qwen2")
    assert not transformers_knows("qwen9")
