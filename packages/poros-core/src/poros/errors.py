"""One error tree. Every message says what failed, what was expected, what was found, where, and what to do next."""

from __future__ import annotations

__all__ = [
    "ArchitectureError",
    "BudgetError",
    "CannotCompareError",
    "CheckpointError",
    "ConfigError",
    "DeviceError",
    "FormatError",
    "NonFiniteError",
    "OutputError",
    "PluginError",
    "PorosError",
    "UserError",
    "explain",
]


def explain(
    what: str, *, expected: object, got: object, where: str | None = None, next_step: str | None = None
) -> str:
    """Return ``<what>: expected <X>, got <Y> (<where>). <next step>.`` as one line."""
    message = f"{what}: expected {expected}, got {got}"
    if where:
        message += f" ({where})"
    message += "."
    if next_step:
        message += " " + next_step.rstrip(".") + "."
    return message


class PorosError(Exception):
    """Base of every error that Poros raises on purpose; ``exit_code`` is what the command line returns."""

    exit_code = 1


class UserError(PorosError, ValueError):
    """The user's input or environment is at fault: one message, no traceback, exit code 2."""

    exit_code = 2


class ConfigError(UserError):
    """A setting is unknown, out of range or contradicts another."""


class CheckpointError(UserError):
    """A model folder, shard, adapter folder or run checkpoint is missing, damaged or incomplete."""


class ArchitectureError(UserError):
    """The model's architecture is refused: found, supported and how to add it are named."""


class FormatError(UserError):
    """A weight format is unknown, not offered or not usable for this tensor."""


class PluginError(UserError):
    """A plugin failed to import, misspelt a hook or claims a name that is taken."""


class DeviceError(UserError):
    """The requested device is absent or cannot do what the run needs."""


class BudgetError(UserError):
    """A memory budget is too small; the largest term is named."""


class OutputError(UserError):
    """The output folder cannot be used as asked."""


class NonFiniteError(PorosError):
    """A loss, gradient norm or saved tensor is NaN or infinite; the run stops before the optimizer step."""


class CannotCompareError(PorosError):
    """Two runs cannot be compared (they do not even repeat themselves, or their settings differ)."""

    exit_code = 3
