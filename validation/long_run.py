"""A long run uses no more and more of anything, and a reporter that fails does not end it: one receipt.

    python validation/long_run.py --output validation/receipts --steps 2000

A tiny model is trained streamed on this CPU, with evaluations, answers, checkpoints and the best one kept, and with a
reporter that raises at every call. Host memory, file descriptors and threads are looked at after every step.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import poros
from poros.checkpoint import newest_complete
from poros.parity.receipts import write_receipt
from poros.run import SamplePrompt, SamplePrompts, StepEvent
from poros.run.audience import MAX_FAULTS

VOCABULARY = 64
# Allocators, lazy imports and the first evaluation, answers and saves come in this share of the steps.
SETTLED_SHARE = 0.25
# What the resident size may grow by from the first to the last tenth of what counts. Measured: 0.25 MB over 1,500
# steps on a 2-core x86-64 machine with torch 2.15, 2026-11-30 (receipts/long-run.json). A leak of 4 KiB a step would
# be 6 MB.
MAX_GROWN_BYTES = 4 * 2**20


class Failing(poros.Reporter):
    """Raises at every call."""

    def __init__(self) -> None:
        self.num_calls = 0

    def _fail(self, *_: Any) -> None:
        self.num_calls += 1
        raise ConnectionError("the server of this reporter is gone")

    on_load = on_start = on_warm_up = on_step = on_eval = on_sample = on_checkpoint = on_end = _fail


class Watch(poros.Reporter):
    """Looks at the process after every step."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.host_bytes: list[int] = []
        self.descriptors: list[int] = []
        self.threads: list[int] = []

    def on_step(self, event: StepEvent) -> None:
        """Take one look."""
        with self._process.oneshot():
            self.host_bytes.append(int(self._process.memory_info().rss))
            self.descriptors.append(int(self._process.num_fds()))
            self.threads.append(int(self._process.num_threads()))

    def measured(self) -> dict[str, Any]:
        """Return what was used once the run had settled, and how much more at its end.

        Memory is compared by the medians of the first and the last tenth of what counts: a single look decides nothing.
        """
        settled = math.ceil(SETTLED_SHARE * len(self.host_bytes))
        memory = self.host_bytes[settled:]
        tenth = max(1, len(memory) // 10)
        first, last = (sorted(part)[tenth // 2] for part in (memory[:tenth], memory[-tenth:]))
        return {
            "settled_after_steps": settled,
            "host_bytes": first,
            "host_bytes_grown": last - first,
            "descriptors": [min(self.descriptors[settled:]), max(self.descriptors[settled:])],
            "threads": [min(self.threads[settled:]), max(self.threads[settled:])],
        }


class Row:
    """A seeded micro-batch of one row."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.input_ids = torch.randint(1, VOCABULARY, (1, 6 + seed % 3), generator=generator)
        self.labels = self.input_ids.clone()
        self.labels[:, 0] = -100


class Steps:
    """Two micro-batches a step, drawn from a few rows."""

    fingerprint = "long-run"

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def step(self, index: int) -> list[Row]:
        """Return the micro-batches of step ``index``."""
        return [Row(index % 7), Row(7 + index % 5)]


def save_model(folder: Path) -> Path:
    """Save a random Qwen2 of two tiny blocks."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def long_run(folder: Path, num_steps: int) -> dict[str, Any]:
    """Train ``num_steps`` steps in an empty folder and return what was found."""
    every, output = max(1, num_steps // 20), folder / "run"
    model = poros.open_model(
        save_model(folder / "model"),
        lora=poros.LoraSettings(rank=4, dropout=0.1),
        numerics=poros.Numerics(compute_dtype=torch.float32),
    )
    settings = poros.RunSettings(
        output=output,
        device="cpu",
        plan=poros.Plan(num_slots=2),
        save_every=every,
        eval_every=every,
        sample_every=every,
        keep_best=True,
    )
    prompt = SamplePrompt(text="3 4 5", input_ids=(3, 4, 5))
    samples = SamplePrompts(prompts=(prompt,), decode=str, stop_ids=frozenset(), max_new_tokens=4)
    failing, watch = Failing(), Watch()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        with poros.Trainer(
            model,
            Steps(num_steps),
            settings,
            evaluation=(Row(100), Row(101)),
            samples=samples,
            reporters=(failing, watch),
        ) as trainer:
            result = trainer.run()
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {
        "num_steps": result.steps,
        "step_lines": [line["step"] for line in lines if "loss" in line] == list(range(1, num_steps + 1)),
        "evaluation_lines": sum("eval_loss" in line for line in lines),
        "sample_lines": len((output / "samples.jsonl").read_text().splitlines()),
        "expected_evaluations": len({*range(every, num_steps + 1, every), num_steps}),
        "faults": failing.num_calls,
        "faults_said": sum("Failing" in str(warning.message) for warning in said),
        "newest_checkpoint": str(newest_complete(output)[0])[-len("step-000000") :],
        "train_seconds": round(result.seconds, 1),
        **watch.measured(),
    }


def broken(found: dict[str, Any], num_steps: int) -> list[str]:
    """Return what of the promise does not hold."""
    evaluations = found["expected_evaluations"]
    checks = {
        "every step is done": found["num_steps"] == num_steps,
        "every step has its line": found["step_lines"],
        "every evaluation has its line": found["evaluation_lines"] == evaluations,
        "every answer has its line": found["sample_lines"] == evaluations + 1,
        "the newest checkpoint is the last step's": found["newest_checkpoint"] == f"step-{num_steps:06d}",
        "the reporter was switched off": found["faults"] == MAX_FAULTS,
        "its faults were said": found["faults_said"] == 2,
        "host memory is flat": found["host_bytes_grown"] <= MAX_GROWN_BYTES,
        "descriptors are flat": len(set(found["descriptors"])) == 1,
        "threads are flat": len(set(found["threads"])) == 1,
    }
    return [name for name, holds in checks.items() if not holds]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, write the receipt, and fail where something is not flat or not complete."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("validation/receipts"))
    parser.add_argument("--steps", type=int, default=2000)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = long_run(Path(folder), chosen.steps)
    failed = broken(found, chosen.steps)
    write_receipt(
        chosen.output / "long-run.json",
        torch.device("cpu"),
        {"measured": found, "allowed": {"host_bytes_grown": MAX_GROWN_BYTES}, "broken": failed},
    )
    print(json.dumps(found, indent=2))
    if failed:
        raise SystemExit(f"Does not hold: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
