"""From what the user names, a config or a model, to the run that is verified."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from poros.plugins import Registry
from poros.run.device import resolve_device
from poros.verify.rows import RandomSteps, open_any
from poros.verify.side import Subject
from poros_cli.assemble import assemble, run_settings
from poros_cli.config import RunConfig
from poros_cli.config_file import load_config
from poros_cli.gate_text import verdict_sentence

__all__ = ["make_subject", "target_config"]

CONFIG_SUFFIXES = (".yaml", ".yml")
# A model alone: small steps of two unequal micro-batches, which `--set` can enlarge.
MODEL_DEFAULTS = ("micro_batches=2", "max_length=256")
# So long that the learning rate hardly falls within the steps that are compared.
MODEL_STEPS = 100
GIVEN_BY = "poros verify"
NO_FILE = "random-rows"


def is_config(target: str) -> bool:
    """Whether ``target`` names a config file; everything else is a model."""
    return target.endswith(CONFIG_SUFFIXES)


def target_config(target: str, overrides: tuple[str, ...], output: Path) -> RunConfig:
    """Return the settings of the run that is verified; it saves into ``output``, whatever its config says.

    Raises:
        ConfigError: see `load_config`.
    """
    ours = {
        "output": (GIVEN_BY, str(output)),
        "resume": (GIVEN_BY, False),
        "overwrite": (GIVEN_BY, False),
        "report_to": (GIVEN_BY, ()),
    }
    if is_config(target):
        return load_config(Path(target), overrides=overrides, flags=ours)
    ours |= {"model": (GIVEN_BY, target), "data": (GIVEN_BY, NO_FILE)}
    return load_config(None, overrides=(*MODEL_DEFAULTS, *overrides), flags=ours)


def make_subject(
    target: str, overrides: tuple[str, ...], output: Path, registry: Registry, say: Callable[[str], None]
) -> Subject:
    """Check and open everything that the run needs, and return it.

    Raises:
        UserError, DataError: as `poros train` would.
    """
    config = target_config(target, overrides, output)
    if is_config(target):
        assembled = assemble(config, registry, reporters=(), say=say)
        trainer = assembled.trainer
        trainer.close()
        about = {"weights": "the model's", "rows": "the run's"}
        return Subject(
            model=trainer.model,
            steps=trainer.steps,
            settings=trainer.settings,
            registry=registry,
            about=about,
        )
    device = resolve_device(config.device)
    model, own = open_any(
        config.model,
        quantization=config.quantization,
        lora=config.lora,
        numerics=config.numerics,
        registry=registry,
        device=device,
    )
    say(f"{model.name}: {model.meta.architecture.name}, {len(model.meta.blocks)} blocks")
    say(verdict_sentence(model.verdict, device))
    if not own:
        say("The folder holds no weights: random ones of its shape are used, seeded, the same on every side.")
    steps = RandomSteps(
        vocab_size=int(model.meta.config.vocab_size),
        num_steps=config.max_steps or MODEL_STEPS,
        micro_batches=config.micro_batches,
        micro_batch_size=config.micro_batch_size,
        max_length=config.max_length,
        length_bucket=config.numerics.length_bucket,
        seed=config.seed,
    )
    say(
        f"No config, so no rows: random tokens are used, {config.micro_batches} micro-batches a step of "
        f"{config.micro_batch_size} x up to {config.max_length}."
    )
    about = {"weights": "the model's" if own else "random, seeded", "rows": "random tokens, seeded"}
    return Subject(model=model, steps=steps, settings=run_settings(config), registry=registry, about=about)
