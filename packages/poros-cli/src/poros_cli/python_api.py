"""What stands behind `poros.train`: a config in any of its forms becomes a trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poros.errors import ConfigError, explain

if TYPE_CHECKING:
    from poros.plugins import Registry
    from poros.run import Reporter, Trainer
    from poros_cli.config import RunConfig

__all__ = ["make_trainer"]


def make_trainer(
    config: Any, registry: Registry, *, reporters: Sequence[Reporter], say: Callable[[str], None]
) -> Trainer:
    """See `poros.interfaces.RunAssembler`."""
    from poros_cli.assemble import assemble  # not at start-up: it imports the training loop

    return assemble(_as_config(config), registry, reporters=reporters, say=say).trainer


def _as_config(config: Any) -> RunConfig:
    from poros_cli.config import RunConfig
    from poros_cli.config_file import config_from_mapping, load_config

    if isinstance(config, RunConfig):
        return config
    if isinstance(config, str | Path):
        return load_config(Path(config))
    if isinstance(config, Mapping):
        return config_from_mapping(config)
    raise ConfigError(
        explain(
            "Cannot train from this config",
            expected="a path, a mapping or a `RunConfig`",
            got=f"{type(config).__name__}",
        )
    )
