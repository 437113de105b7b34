"""Stock trainers on the drop-in module: Transformers' `Trainer`, TRL's `SFTTrainer` and `DPOTrainer`, unpatched.

Each trains the streamed module and the resident one over several optimizer steps, which must agree in every bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

import poros
from poros.errors import UserError

MakeModule = Callable[..., Any]

# Rows of another width round differently.
FLOAT32_TOLERANCE = 1e-5

WORDS, PAD, EOS, UNKNOWN = 60, 60, 61, 62
LORA = poros.LoraSettings(rank=4, dropout=0.2)

pytestmark = [
    # TRL 1.16 sets the old names of arguments that Transformers 5.24 renamed.
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning"),
]


@pytest.fixture
def make_module(make_module: MakeModule, tier: str) -> MakeModule:
    """Modules on the tier's device."""
    return functools.partial(make_module, device="cuda" if tier == "gpu" else "cpu")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Words ``w0`` to ``w59``, right-padded."""
    vocabulary = {f"w{index}": index for index in range(WORDS)} | {
        "<pad>": PAD,
        "<eos>": EOS,
        "<unk>": UNKNOWN,
    }
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def words(start: int, count: int) -> str:
    return " ".join(f"w{index % WORDS}" for index in range(start, start + count))


def arguments(output: Path, tier: str, **changes: Any) -> dict[str, Any]:
    """Two rows a micro-batch, two micro-batches a step, three steps; unequal rows, so that there is padding."""
    return {
        "output_dir": str(output),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": tier == "cpu",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        **changes,
    }


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [PAD] * (width - len(row["input_ids"])) for row in rows])
    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def stock(module: Any, output: Path, tier: str, tokenizer: Any, **changes: Any) -> Any:
    rows = [
        {"input_ids": torch.arange(index, index + 4 + index % 4).remainder(WORDS).tolist()}
        for index in range(16)
    ]
    args = TrainingArguments(**arguments(output, tier, **changes))
    return Trainer(model=module, args=args, train_dataset=rows, eval_dataset=rows[:3], data_collator=collate)


def sft(module: Any, output: Path, tier: str, tokenizer: Any, **changes: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list(
        [{"prompt": words(i, 2), "completion": " " + words(i + 2, 2 + i % 3)} for i in range(16)]
    )
    args = SFTConfig(**arguments(output, tier, **{"bf16": False, "max_length": 16, **changes}))
    return SFTTrainer(model=module, args=args, train_dataset=rows, processing_class=tokenizer)


def dpo(module: Any, output: Path, tier: str, tokenizer: Any, **changes: Any) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = Dataset.from_list(
        [
            {
                "prompt": words(i, 2),
                "chosen": " " + words(i + 2, 2 + i % 3),
                "rejected": " " + words(i + 9, 1),
            }
            for i in range(16)
        ]
    )
    # DPOTrainer switches dropout off by itself unless it is told otherwise.
    args = DPOConfig(**arguments(output, tier, bf16=False, max_length=16, disable_dropout=False, **changes))
    return DPOTrainer(model=module, args=args, train_dataset=rows, processing_class=tokenizer)


TRAINERS = {"Trainer": stock, "SFTTrainer": sft, "DPOTrainer": dpo}


def trained(trainer: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train and return every logged loss and every trained tensor."""
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    after = {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert after.keys() == before.keys()
    assert all(not torch.equal(after[name], value) for name, value in before.items())
    return losses, after


@pytest.mark.parametrize("name", TRAINERS)
def test_streaming_changes_no_bit_of_a_stock_trainers_run(
    make_module: MakeModule, tokenizer: Any, name: str, tmp_path: Path, tier: str
) -> None:
    runs = []
    for plan in ({"residency": "resident"}, {"num_slots": 2}):
        trainer = TRAINERS[name](make_module(LORA, **plan), tmp_path / str(len(runs)), tier, tokenizer)
        runs.append(trained(trainer))
    (losses, resident), (streamed_losses, streamed) = runs
    assert len(losses) == 3
    assert streamed_losses == losses
    assert all(torch.equal(streamed[key], tensor) for key, tensor in resident.items())


def test_the_reference_of_dpo_is_the_adapter_as_it_was(
    make_module: MakeModule, tokenizer: Any, tmp_path: Path, tier: str
) -> None:
    """TRL copies the adapter to one called ``ref``; before the first step policy and reference agree."""
    trainer = dpo(make_module(), tmp_path, tier, tokenizer)
    assert trainer.ref_model is None
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "rewards/margins" in entry]
    assert logged[0]["rewards/margins"] == 0.0
    assert logged[-1]["rewards/margins"] != 0.0
    model = trainer.model
    ref = {n: p for n, p in model.named_parameters() if ".ref." in n}
    assert ref
    assert all(not p.requires_grad for p in ref.values())
    assert any(
        not torch.equal(p, model.get_parameter(n.replace(".ref.", ".default."))) for n, p in ref.items()
    )


def test_accumulated_micro_batches_are_the_engines_step(
    make_module: MakeModule,
    open_qwen3: Callable[..., poros.OpenModel],
    tokenizer: Any,
    tmp_path: Path,
    tier: str,
) -> None:
    """Trainer hands over the step's supervised tokens, so its gradient is `engine.step`'s, in every bit."""
    module = make_module()
    trainer = stock(module, tmp_path, tier, tokenizer, max_steps=1, max_grad_norm=0.0)
    batches, grads = [], {}
    forward = module.forward

    def record(**given: Any) -> Any:
        batches.append({name: given[name].cpu() for name in ("input_ids", "labels")})
        return forward(**given)

    module.forward = record
    trainer.add_callback(_Gradients(module, grads))
    engine = open_qwen3("nf4", poros.LoraSettings(rank=4)).load(
        plan=poros.Plan(residency="resident", graphs=False), device=module.device, seed=3
    )
    for name, tensor in engine.model.adapter_tensors().items():
        tensor.copy_(module.get_parameter(name.replace(".weight", ".default.weight")).detach())
    trainer.train()
    engine.step([_Rows(**batch) for batch in batches], 0)
    assert len(batches) == 2
    expected = engine.model.adapter_tensors(engine.model.bank.gradients)
    assert len(expected) == len(grads)
    for name, tensor in expected.items():
        assert torch.equal(grads[name.replace(".weight", ".default.weight")], tensor), name


class _Rows:
    def __init__(self, input_ids: torch.Tensor, labels: torch.Tensor) -> None:
        self.input_ids, self.labels = input_ids, labels


class _Gradients:
    """A callback that copies what the optimizer is about to read."""

    def __new__(cls, module: Any, found: dict[str, torch.Tensor]) -> Any:
        from transformers import TrainerCallback

        class Callback(TrainerCallback):
            def on_pre_optimizer_step(self, *arguments: Any, **named: Any) -> None:
                found.update({n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})

        return Callback()


def test_a_resumed_trainer_ends_where_the_uninterrupted_one_does(
    make_module: MakeModule, tokenizer: Any, tmp_path: Path, tier: str
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    _, whole = trained(stock(make_module(LORA), tmp_path / "whole", tier, tokenizer, **saving))
    again = stock(make_module(LORA), tmp_path / "again", tier, tokenizer, **saving)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    found = dict(again.model.named_parameters())
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


def test_a_checkpoint_holds_the_adapter_and_not_the_base(
    make_module: MakeModule, tokenizer: Any, tmp_path: Path, tier: str
) -> None:
    trainer = stock(make_module(), tmp_path, tier, tokenizer)
    trainer.save_model(str(tmp_path / "saved"))
    from safetensors import safe_open

    with safe_open(tmp_path / "saved" / "adapter_model.safetensors", "pt") as file:
        names = set(file.keys())
    assert names
    assert all(".lora_A.weight" in name or ".lora_B.weight" in name for name in names)


def test_evaluation_gives_the_loss_and_changes_no_bit(
    make_module: MakeModule, tokenizer: Any, tmp_path: Path, tier: str
) -> None:
    """Without dropout: a data loader's iterator draws from the generator that masks are drawn from."""
    _, plain = trained(stock(make_module(), tmp_path / "plain", tier, tokenizer))
    trainer = stock(
        make_module(), tmp_path / "looked at", tier, tokenizer, eval_strategy="steps", eval_steps=1
    )
    _, looked_at = trained(trainer)
    assert len([entry for entry in trainer.state.log_history if "eval_loss" in entry]) == 3
    assert all(torch.equal(looked_at[name], tensor) for name, tensor in plain.items())


def test_gradient_checkpointing_asked_for_changes_no_bit(
    make_module: MakeModule, tokenizer: Any, tmp_path: Path, tier: str
) -> None:
    """A block is recomputed in any case, so the switch that most recipes set has nothing to do."""
    _, plain = trained(stock(make_module(), tmp_path / "plain", tier, tokenizer))
    _, asked = trained(stock(make_module(), tmp_path / "asked", tier, tokenizer, gradient_checkpointing=True))
    assert all(torch.equal(asked[name], tensor) for name, tensor in plain.items())


def test_mixed_precision_of_the_trainer_does_not_reach_the_model(
    make_module: MakeModule, tokenizer: Any, tmp_path: Path, tier: str
) -> None:
    _, plain = trained(stock(make_module(), tmp_path / "plain", tier, tokenizer))
    _, mixed = trained(stock(make_module(), tmp_path / "mixed", tier, tokenizer, bf16=True))
    assert all(torch.equal(mixed[name], tensor) for name, tensor in plain.items())


def test_left_padding_of_a_tokenizer_is_refused_before_a_step(
    make_module: MakeModule, tokenizer: Any, tmp_path: Path, tier: str
) -> None:
    module = make_module()
    trainer = stock(module, tmp_path, tier, tokenizer)
    trainer.data_collator = lambda rows: {name: t.flip(1) for name, t in collate(rows).items()}
    with pytest.raises(UserError, match="padding_side"):
        trainer.train()


@pytest.mark.filterwarnings("ignore:Padding-free training is enabled:UserWarning")
def test_rows_without_padding_train_as_padded_ones_do(
    make_module: MakeModule, tokenizer: Any, tmp_path: Path, tier: str
) -> None:
    """TRL joins a batch's rows to one and tells them apart by their positions."""
    padded, _ = trained(sft(make_module(), tmp_path / "padded", tier, tokenizer))
    joined, _ = trained(
        sft(make_module(), tmp_path / "joined", tier, tokenizer, padding_free=True, max_length=None)
    )
    assert joined == pytest.approx(padded, abs=FLOAT32_TOLERANCE)


def test_noise_on_embeddings_reaches_the_blocks_and_changes_no_bit_between_plans(
    make_module: MakeModule, tokenizer: Any, tmp_path: Path, tier: str
) -> None:
    runs = [
        trained(stock(make_module(**plan), tmp_path / str(alpha), tier, tokenizer, neftune_noise_alpha=alpha))
        for alpha, plan in ((None, {"num_slots": 2}), (5, {"num_slots": 2}), (5, {"residency": "resident"}))
    ]
    assert runs[1][0] == runs[2][0]
    assert runs[0][0] != runs[1][0]


def test_metrics_of_an_evaluation_get_logits_when_the_model_is_told(
    make_module: MakeModule, tokenizer: Any, tmp_path: Path, tier: str
) -> None:
    module = make_module()
    module.get_base_model().logits_with_labels = True
    trainer = stock(module, tmp_path, tier, tokenizer)
    trainer.compute_metrics = lambda found: {"width": found.predictions.shape[-1]}
    assert trainer.evaluate()["eval_width"] == 64


def test_precomputed_reference_log_probs_train_the_same_bits(
    make_module: MakeModule, tokenizer: Any, tmp_path: Path, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    losses = [
        trained(dpo(make_module(), tmp_path / str(ahead), tier, tokenizer, precompute_ref_log_probs=ahead))[0]
        for ahead in (False, True)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=FLOAT32_TOLERANCE)
