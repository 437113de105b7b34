"""What `poros generate` does: open, plan, load, and write answers to stdout as they come."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import TextIO

import torch
from rich.console import Console
from rich.text import Text
from transformers import TextStreamer

from poros import determinism
from poros.clock import Stopwatch, per_second
from poros.errors import ConfigError, UserError, explain
from poros.export import AdaptedModel, Adapter, find_adapter, open_with_adapter
from poros.export.merging import DEFAULT_FORMAT
from poros.planning.shape import StepShape
from poros.plugins import Registry
from poros.run import OpenModel, RunSettings, open_model
from poros.run.device import refuse_many_processes, resolve_device, slow_arithmetic_notes
from poros.run.fingerprint import flatten
from poros.run.generation import Sampling, stream_tokens
from poros.run.placement import plan_run
from poros.settings import Numerics
from poros_cli.adapted import base_of
from poros_cli.plan_text import plan_sentence
from poros_cli.terminal import printable
from poros_cli.tokenizer import load_tokenizer, stop_token_ids
from poros_data.limits import bounded_template

__all__ = ["Answerer"]

# Room for a prompt when the plan is made before one is known.
PROMPT_TOKENS = 512


class _Streamer(TextStreamer):
    """Writes an answer as it comes; a terminal is shown escapes where it would obey, a file gets the text as it is."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(printable(text) if sys.stdout.isatty() else text, stream_end)


class Answerer:
    """A loaded model that answers. Use as a context manager: it releases page locks.

    Args:
        registry: the loaded plugins.
        model, adapter: what the user named.
        quantization: weight format; None is the run's.
        device, vram_bytes, cache_dir: as in training.
        max_new_tokens, sampling: of every answer.
        chat: prompts are messages of a conversation.
        console: for everything but answers.

    Raises:
        UserError: anything that is wrong with the user's input, before weights are read.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        model: str | None,
        adapter: Path | None,
        quantization: str | None,
        device: str,
        vram_bytes: int | None,
        cache_dir: str | None,
        max_new_tokens: int,
        sampling: Sampling,
        chat: bool,
        console: Console,
    ) -> None:
        refuse_many_processes()
        self._console = console
        self._max_new_tokens = max_new_tokens
        self._sampling = sampling
        chosen = resolve_device(device)
        determinism.configure(chosen)
        found = None if adapter is None else find_adapter(adapter)
        opened, adapted = _open(found, base_of(found, model), quantization, registry, chosen)
        for note in (*(opened.notes if adapted is None else adapted.notes), *_slow(opened, chosen)):
            self._say(f"Note: {note}")
        self._tokenizer = load_tokenizer(opened.folder)
        if chat and not self._tokenizer.chat_template:
            raise ConfigError(
                explain(
                    "Cannot chat with this model",
                    expected="a chat template among the tokenizer's files",
                    got="none",
                    next_step="Leave out `--chat` and write the prompt as the model was trained on it",
                )
            )
        end = self._tokenizer.eos_token_id
        self._own_stops = () if end is None else (end,)
        self._stops = stop_token_ids(opened.folder) or self._own_stops
        settings = RunSettings(output=".", device=device, device_budget_bytes=vram_bytes, cache_dir=cache_dir)
        shape = StepShape(
            num_micro_batches=1,
            micro_batch_size=1,
            tokens=self._bucketed(opened, PROMPT_TOKENS + max_new_tokens),
        )
        planned, _, notes = plan_run(opened, settings, chosen, shape)
        for note in notes:
            self._say(f"Note: {note}")
        who = (
            "the base alone"
            if found is None
            else f"{len(found.tensors) // 2} adapted layers of {found.folder}"
        )
        self._say(f"{opened.name}, {opened.weight_format.name}, {who}")
        self._say(f"Plan: {plan_sentence(flatten(planned.plan), len(opened.meta.blocks))}")
        self._engine = opened.load(
            plan=planned.plan,
            device=chosen,
            seed=0,
            cache_dir=None if cache_dir is None else Path(cache_dir).expanduser(),
        )
        if adapted is not None:
            adapted.fill(self._engine.model)

    def __enter__(self) -> Answerer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.close()

    def continue_text(self, text: str) -> None:
        """Write what follows ``text``, which gets the special tokens that the tokenizer puts before any text."""
        if self._tokenizer.chat_template:
            self._say("Note: the model has a chat template; `--chat` makes PROMPT a user's message.")
        self._answer(self._tokenizer(text)["input_ids"], ())

    def reply(self, messages: Sequence[dict[str, str]]) -> str:
        """Write and return the assistant's answer to a conversation.

        Raises:
            UserError: the template refuses the conversation.
        """
        try:
            with bounded_template():
                text = self._tokenizer.apply_chat_template(
                    list(messages), add_generation_prompt=True, tokenize=False
                )
        except Exception as error:  # a template raises what it wants
            raise UserError(f"The chat template refuses the conversation: {error}.") from error
        return self._answer(self._tokenizer(text, add_special_tokens=False)["input_ids"], self._own_stops)

    def talk(self, lines: TextIO) -> None:
        """Answer line after line as one conversation, until the input ends."""
        self._say("One message per line; the end of the input (Ctrl-D) ends the conversation.")
        messages: list[dict[str, str]] = []
        for line in lines:
            if content := line.strip():
                messages.append({"role": "user", "content": content})
                messages.append({"role": "assistant", "content": self.reply(messages)})

    def _answer(self, prompt: Sequence[int], more_stops: Collection[int]) -> str:
        streamer = _Streamer(self._tokenizer, skip_special_tokens=True)
        tokens: list[int] = []
        watch, rest = Stopwatch(), Stopwatch()
        first = 0.0
        for token in stream_tokens(
            self._engine,
            prompt,
            max_new_tokens=self._max_new_tokens,
            stop_ids={*self._stops, *more_stops},
            sampling=self._sampling,
        ):
            if not tokens:
                first, rest = watch.seconds, Stopwatch()
            tokens.append(token)
            streamer.put(torch.tensor([token]))
        streamer.end()
        seconds = rest.seconds
        ended = "stopped by --max-new-tokens" if len(tokens) == self._max_new_tokens else "ended by itself"
        rate = (
            f", {per_second(len(tokens) - 1, seconds):.2f} tokens/s after the first"
            if len(tokens) > 1
            else ""
        )
        self._say(f"{len(prompt)} + {len(tokens)} tokens, {ended}; first after {first:.2f} s{rate}")
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    @staticmethod
    def _bucketed(model: OpenModel, tokens: int) -> int:
        bucket = model.numerics.length_bucket
        return -(-tokens // bucket) * bucket

    def _say(self, line: str) -> None:
        self._console.print(Text(line))


def _open(
    found: Adapter | None, name: str, quantization: str | None, registry: Registry, device: torch.device
) -> tuple[OpenModel, AdaptedModel | None]:
    """Open a base with or without an adapter; where no run says how it was computed, on a CPU in float32."""
    own = Numerics(compute_dtype=torch.float32) if device.type == "cpu" else Numerics()
    if found is None:
        weight_format = quantization or DEFAULT_FORMAT
        return open_model(name, quantization=weight_format, numerics=own, registry=registry), None
    adapted = open_with_adapter(
        name,
        found,
        quantization=quantization or found.quantization(registry) or DEFAULT_FORMAT,
        numerics=own if found.run is None else found.numerics(),
        registry=registry,
    )
    return adapted.model, adapted


def _slow(model: OpenModel, device: torch.device) -> tuple[str, ...]:
    return slow_arithmetic_notes(device, model.numerics.compute_dtype)
