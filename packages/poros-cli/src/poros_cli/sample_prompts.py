"""The prompts that a run answers from time to time: from a list or a file to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from poros.errors import ConfigError, explain
from poros.run import OpenModel, SamplePrompt, SamplePrompts
from poros_cli.config import RunConfig
from poros_cli.tokenizer import stop_token_ids
from poros_data.limits import bounded_template
from poros_data.settings import read_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["read_prompts", "sample_prompts"]


def read_prompts(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the prompts of the setting ``sample_prompts``.

    Args:
        given: prompts, or the name of a text file with one per line; blank lines are none.

    Raises:
        ConfigError: the file cannot be read, there is no prompt in it, or one of a list is blank.
    """
    if given is None:
        return ()
    if not isinstance(given, str):
        if not all(prompt.strip() for prompt in given):
            raise ConfigError(
                explain("Bad setting `sample_prompts`", expected="text in every prompt", got="a blank one")
            )
        return tuple(given)
    try:
        # On line breaks alone: other separators of Unicode may stand in a prompt.
        lines = Path(given).expanduser().read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            explain(
                "Bad setting `sample_prompts`",
                expected="a list of prompts, or a UTF-8 text file with one per line",
                got=error.strerror if isinstance(error, OSError) else error,
                where=given,
            )
        ) from error
    prompts = tuple(line.strip() for line in lines if line.strip())
    if not prompts:
        raise ConfigError(
            explain("Bad setting `sample_prompts`", expected="a prompt per line", got="none", where=given)
        )
    return prompts


def sample_prompts(
    prompts: Sequence[str], tokenizer: PreTrainedTokenizerBase, model: OpenModel, config: RunConfig
) -> SamplePrompts:
    """Return the prompts as the model reads them: a user's message where there is a chat template, else plain text.

    Raises:
        ConfigError: the template refuses a prompt, or one is longer than ``max_length``.
    """
    template = read_template(config.rows.template) or tokenizer.chat_template
    end = tokenizer.eos_token_id
    own = () if end is None else (end,)
    stops = stop_token_ids(model.folder)
    return SamplePrompts(
        prompts=[
            SamplePrompt(text=text, input_ids=_ids(text, number, tokenizer, template, config.max_length))
            for number, text in enumerate(prompts, start=1)
        ],
        decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
        # As in `poros generate`: of a chat the tokenizer's own end counts besides.
        stop_ids=frozenset((*stops, *own) if template else stops or own),
        max_new_tokens=config.sample_tokens,
    )


def _ids(
    text: str, number: int, tokenizer: PreTrainedTokenizerBase, template: str | None, max_length: int
) -> list[int]:
    if template is None:
        ids = list(tokenizer(text)["input_ids"])
    else:
        try:
            with bounded_template():
                rendered = tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}],
                    chat_template=template,
                    add_generation_prompt=True,
                    tokenize=False,
                )
        except Exception as error:  # a template raises what it wants
            raise ConfigError(
                f"Bad setting `sample_prompts`: the template refuses prompt {number}: {error}."
            ) from error
        ids = list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    if not 0 < len(ids) <= max_length:
        raise ConfigError(
            explain(
                "Bad setting `sample_prompts`",
                expected=f"1 to {max_length} tokens in a prompt (`max_length`)",
                got=f"{len(ids)} in prompt {number}",
            )
        )
    return ids
