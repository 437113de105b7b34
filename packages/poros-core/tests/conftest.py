"""Tiny checkpoints and hand-made rows for tests of whole runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import poros
from poros.interfaces import ParityCase
from poros.plugins import Registry, load_registry
from poros.run import SamplePrompts
from poros.settings import Plan

if TYPE_CHECKING:
    from poros.parity.case_run import CaseRun

VOCABULARY = 48


@dataclass
class Rows:
    """A micro-batch with row ids."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    row_ids: tuple[int, ...]


class RowSteps:
    """Unequal seeded rows, one per micro-batch; each epoch in an order of its own, its last step shorter."""

    def __init__(self, *, num_rows: int = 23, accumulation: int = 4, epochs: int = 2) -> None:
        self.num_rows, self.accumulation = num_rows, accumulation
        self.steps_per_epoch = -(-num_rows // accumulation)
        self.num_steps = epochs * self.steps_per_epoch
        self.fingerprint = f"rows-{num_rows}-{accumulation}"

    def row(self, index: int) -> Rows:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(1, VOCABULARY, (1, 4 + index % 5), generator=generator)
        labels = ids.clone()
        labels[:, : 1 + index % 2] = -100
        return Rows(ids, labels, (index,))

    def step(self, index: int) -> list[Rows]:
        epoch, place = divmod(index, self.steps_per_epoch)
        order = torch.randperm(self.num_rows, generator=torch.Generator().manual_seed(epoch)).tolist()
        start = place * self.accumulation
        return [self.row(row) for row in order[start : start + self.accumulation]]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-block random Qwen2 checkpoint in bfloat16 with non-zero biases."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    folder = tmp_path_factory.mktemp("model") / "tiny"
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def make_steps() -> type[RowSteps]:
    """The class of a step source."""
    return RowSteps


MakeTrainer = Callable[..., poros.Trainer]


@pytest.fixture
def make_trainer(tiny_model: Path) -> MakeTrainer:
    """Open the tiny model and return a trainer; keyword arguments override the usual settings."""

    def make(
        output: Path,
        *,
        steps: object = None,
        lora: poros.LoraSettings | None = None,
        numerics: poros.Numerics | None = None,
        model: Path = tiny_model,
        quantization: str = "nf4",
        evaluation: tuple[object, ...] = (),
        samples: SamplePrompts | None = None,
        reporters: tuple[poros.Reporter, ...] = (),
        data_record: dict[str, object] | None = None,
        run_record: dict[str, object] | None = None,
        **settings: object,
    ) -> poros.Trainer:
        opened = poros.open_model(
            model,
            quantization=quantization,
            lora=lora or poros.LoraSettings(rank=4, dropout=0.3),
            numerics=numerics,
        )
        defaults = {"device": "cpu", "optimizer": poros.OptimizerSettings(learning_rate=1e-2)}
        return poros.Trainer(
            opened,
            steps or RowSteps(),  # type: ignore[arg-type]
            poros.RunSettings(output=output, **{**defaults, **settings}),  # type: ignore[arg-type]
            evaluation=evaluation,  # type: ignore[arg-type]
            samples=samples,
            reporters=reporters,
            data_record=data_record,
            run_record=run_record,
        )

    return make


@pytest.fixture(scope="session")
def registry() -> Registry:
    """The installed plugins."""
    return load_registry()


@pytest.fixture(scope="session")
def cpu() -> torch.device:
    """The CPU, with deterministic algorithms."""
    from poros.determinism import configure

    device = torch.device("cpu")
    configure(device)
    return device


def _four_blocks() -> object:
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )


@pytest.fixture(scope="session")
def tiny_case() -> ParityCase:
    """Four random Qwen2 blocks, three unequal micro-batches, every block adapted."""
    return ParityCase(
        name="tiny",
        architecture="qwen2",
        make_config=_four_blocks,
        row_lengths=((9, 4), (5,), (7,)),
        lora={"rank": 2},
        num_steps=2,
    )


StartRun = Callable[..., "CaseRun"]


@pytest.fixture
def start_run(registry: Registry, cpu: torch.device, tiny_case: ParityCase) -> StartRun:
    """Start the tiny case under a plan; keyword arguments change fields of the case."""

    from poros.parity.case_run import start_case

    def start(plan: Plan | None = None, **changes: Any) -> CaseRun:
        return start_case(replace(tiny_case, **changes), plan or Plan(num_slots=2), registry, cpu)

    return start


MakeModule = Callable[..., Any]


@pytest.fixture(scope="session")
def qwen3_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A four-block random Qwen3 checkpoint in bfloat16 whose head is not tied."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(2)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
        eos_token_id=61,
        pad_token_id=60,
    )
    folder = tmp_path_factory.mktemp("qwen3") / "tiny"
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def open_qwen3(qwen3_model: Path) -> Callable[..., poros.OpenModel]:
    """Open the tiny Qwen3 in float32, once per format and adapter."""
    opened: dict[tuple[str, str], poros.OpenModel] = {}

    def open_(quantization: str, lora: poros.LoraSettings) -> poros.OpenModel:
        key = quantization, repr(lora)
        if key not in opened:
            numerics = poros.Numerics(compute_dtype=torch.float32, storage_dtype=torch.float32)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "EXPERIMENTAL: the weight format `bf16_bitwise`")
                opened[key] = poros.open_model(
                    qwen3_model, quantization=quantization, lora=lora, numerics=numerics
                )
        return opened[key]

    return open_


@pytest.fixture
def make_module(open_qwen3: Callable[..., poros.OpenModel]) -> MakeModule:
    """Return streamed modules of the tiny Qwen3 in float32; the keyword arguments left over are the plan's."""

    def make(
        lora: poros.LoraSettings | None = None,
        *,
        quantization: str = "nf4",
        device: str = "cpu",
        **plan: Any,
    ) -> Any:
        module = poros.streamed_model(
            open_qwen3(quantization, lora or poros.LoraSettings(rank=4)),
            plan=Plan(**(plan or {"num_slots": 2})),
            device=device,
            seed=3,
        )
        generator = torch.Generator().manual_seed(5)
        for name, parameter in module.named_parameters():
            if "lora_B" in name:  # zeros would hide the A side
                with torch.no_grad():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        return module.train()

    return make
