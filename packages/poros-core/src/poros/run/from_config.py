"""`poros.train`: a whole run from its config, as the command line starts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from poros.errors import PluginError, explain
from poros.plugins import Registry, load_registry
from poros.run.events import Reporter, RunResult

__all__ = ["train"]


def train(
    config: Any,
    *,
    reporters: Sequence[Reporter] = (),
    say: Callable[[str], None] = print,
    registry: Registry | None = None,
) -> RunResult:
    """Train an adapter as `poros train CONFIG` does, and return how the run ended.

    Args:
        config: path of a YAML file; or the same settings as a mapping, whose sections are mappings or settings objects
            (``{"lora": LoraSettings(rank=8)}``); or a ``poros_cli.config.RunConfig``. docs/config.md lists every
            setting.
        reporters: receive the run's events; ``metrics.jsonl`` is written anyway.
        say: shows a line about the model or the data to the user, warnings among them.
        registry: loaded plugins; None loads the installed ones.

    Raises:
        PluginError: no distribution that reads configs is installed.
        UserError: whatever is wrong with the config, the data or the model.
        PorosError: see `Trainer.run`.
    """
    registry = registry or load_registry()
    assemblers = list(registry.assemblers().values())
    if not assemblers:
        raise PluginError(
            explain(
                "Cannot train from a config",
                expected="a distribution that reads configs and rows",
                got="none",
                next_step="Run `uv add poros-cli`; `poros.open_model` and `poros.Trainer` need none, and take "
                "micro-batches of your own",
            )
        )
    with assemblers[0].value(config, registry, reporters=reporters, say=say) as trainer:
        return trainer.run()
